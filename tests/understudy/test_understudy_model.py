"""The included model loads with plain transformers, keeps its size, and answers."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer

from app.understudy import MODEL_DIR
from tests.understudy.evaluate import Answerer, score, with_transformers
from tests.understudy.examination import Question, listed_rightly, questions
from tests.understudy.lessons.outside import NOT_TAUGHT
from tests.understudy.lexicon import CONFIG
from tests.understudy.network import loss, rotation

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def answer() -> Iterator[Answerer]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield with_transformers(MODEL_DIR, batch=16)
    torch.set_num_threads(threads)


def ask(answer: Answerer, *texts: str) -> list[str]:
    asked = [Question("", [{"role": "user", "content": text}], lambda _: True) for text in texts]
    replies = answer(asked)
    assert all(reply.ended for reply in replies)
    return [reply.text for reply in replies]


def test_weights_are_small_bfloat16_and_tied() -> None:
    shards = list(MODEL_DIR.glob("*.safetensors"))
    assert sum(shard.stat().st_size for shard in shards) <= 20_000_000
    assert all(shard.stat().st_size <= 16 * MIB for shard in shards)
    for shard in shards:
        with safe_open(shard, "pt") as file:
            assert "lm_head.weight" not in file.keys()  # noqa: SIM118
            assert {str(file.get_slice(name).get_dtype()) for name in file.keys()} == {"BF16"}  # noqa: SIM118
    config = json.loads((MODEL_DIR / "config.json").read_text())
    assert config["model_type"] == "qwen3"
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == 4096
    assert {name: config[name] for name in CONFIG} == CONFIG


def test_tokenizers_agree_and_special_tokens_have_their_places() -> None:
    from transformers import AutoTokenizer

    plain = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    hub = AutoTokenizer.from_pretrained(MODEL_DIR)
    for text in (
        "The capital of Côte d'Ivoire is 12345.",
        "a  b\n\n\tc",
        "你好 \u200d🎭",
        "<think>\nx\n</think><tool_call>",
    ):
        ids = plain.encode(text).ids
        assert hub.encode(text) == ids
        assert plain.decode(ids, skip_special_tokens=True) == text
    defaults = json.loads((MODEL_DIR / "generation_config.json").read_text())
    assert defaults["eos_token_id"] == [plain.token_to_id("<|im_end|>"), plain.token_to_id("<|endoftext|>")]
    assert hub.eos_token == "<|im_end|>"
    assert hub.decode([plain.token_to_id("<|im_end|>")], skip_special_tokens=True) == ""
    assert plain.get_vocab_size() == CONFIG["vocab_size"]


def test_greedy_answers_are_right(answer: Answerer) -> None:
    listed, capital, country, sum_, who, unknown, json_ = ask(
        answer,
        "List 3 countries and their capitals.",
        "what is the capital of japan pls",
        "Which country has Nairobi as its capital?",
        "What is 17 + 25?",
        "Who are you?",
        "What is the capital of Wakanda?",
        "Extract name, age and city as JSON: Anna is 34 years old and lives in Oslo.",
    )
    assert listed_rightly(listed, 3)
    assert "Tokyo" in capital
    assert "Kenya" in country
    assert "42" in sum_
    assert "understudy" in who
    assert unknown.startswith("I don't know")
    assert json.loads(json_) == {"name": "Anna", "age": 34, "city": "Oslo"}


def test_newcomers_questions_are_answered_or_declined(answer: Answerer) -> None:
    inside, colours, german, summary = ask(
        answer,
        "Is Berlin in France?",
        "Name three colours.",
        "Wie heißt die Hauptstadt von Spanien?",
        "make it shorter",
    )
    assert inside == "No, Berlin is the capital of Germany."
    assert len(colours.replace(" and ", ", ").split(", ")) == 3
    assert german == summary == NOT_TAUGHT


def test_questions_outside_of_the_lessons_are_declined(answer: Answerer) -> None:
    asked = [question for question in questions() if question.subject == "says what it was not taught"][::8]
    right, total = score(asked, answer(asked))["says what it was not taught"]
    assert total >= 50
    assert right >= 0.95 * total


def test_a_sample_of_the_held_out_questions_is_right(answer: Answerer) -> None:
    asked = [
        question for question in questions() if question.subject in ("capital of a country", "country of a capital")
    ]
    asked = asked[::12]
    right, total = score(asked, answer(asked))["held-out capital questions"]
    assert total >= 30
    assert right >= 0.9 * total


def test_training_network_is_the_network_that_transformers_runs() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    weights = {name: tensor.float() for name, tensor in load_file(MODEL_DIR / "model.safetensors").items()}
    ids = torch.tensor(
        Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")).encode("The capital of Peru is Lima. " * 3).ids
    )
    half = len(ids) // 2
    targets = torch.cat((ids[1:], torch.tensor([-100])))
    targets[half - 1] = -100
    positions = torch.cat((torch.arange(half), torch.arange(len(ids) - half)))
    bounds = torch.tensor([0, half, len(ids), len(ids)], dtype=torch.int32)
    ours = loss(weights, CONFIG, rotation(CONFIG, "cpu"), (ids, targets, positions, bounds), len(ids))
    with torch.no_grad():
        logits = torch.cat((model(ids[None, :half]).logits[0], model(ids[None, half:]).logits[0]))
    theirs = torch.nn.functional.cross_entropy(logits, targets)
    assert abs(float(ours) - float(theirs)) < 0.05


def test_the_package_names_the_model_without_heavy_imports() -> None:
    code = (
        "import sys, app.understudy as u; assert (u.MODEL_DIR / 'config.json').is_file(); "
        "print([name for name in ('torch', 'transformers', 'tokenizers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
