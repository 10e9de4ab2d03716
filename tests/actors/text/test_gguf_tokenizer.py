"""The tokenizer, the chat template and the defaults that a GGUF file holds."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc

import pytest
from tokenizers import Tokenizer

from actors.protocol.requests import SamplingParams
from actors.text.gguf_tokenizer import GgufTokenizerError, build_tokenizer, tokenizer_settings
from actors.text.model_files import ModelFiles, ModelPathError, resolve_model_path
from actors.text.text_codec import TextCodec
from app.understudy import MODEL_DIR
from tests.kits.engines import small_engine
from tests.kits.gguf_writer import write_gguf
from tests.kits.tiny_model import make_tiny_model

pytestmark = pytest.mark.usefixtures("warm_workers")

MARK = "\u2581"
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
WORDS = [MARK, "a", "b", "c", "ab", f"{MARK}a", f"{MARK}ab", "abc", "<|tool|>"]
SENTENCE_PIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": PIECES + WORDS,
    "tokenizer.ggml.scores": [0.0] * len(PIECES) + [-9.0, -9.0, -9.0, -9.0, -1.0, -3.0, -2.0, -4.0, 0.0],
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 8, 4],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    return write_gguf(MODEL_DIR, tmp_path_factory.mktemp("gguf") / "box.Q8_0.gguf", "Q8_0")


def byte_level(**more):
    alphabet = [chr(256 + place) for place in range(33)] + [chr(place) for place in range(33, 127)]
    tokens = ["<|end|>", *alphabet, "12", "123", "12345"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, *[1] * (len(tokens) - 1)],
        "tokenizer.ggml.merges": ["1 2", "12 3"],
        "tokenizer.ggml.bos_token_id": 0,
    } | more


def texts(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.encode(text).tokens


def test_the_patterns_cut_numbers_as_their_models_do():
    assert texts(build_tokenizer(byte_level()), "12345") == ["<|end|>", "123", "4", "5"]
    assert texts(build_tokenizer(byte_level(**{"tokenizer.ggml.pre": "qwen2"})), "123") == ["1", "2", "3"]
    assert texts(build_tokenizer(byte_level(**{"tokenizer.ggml.pre": "gpt-2"})), "1234") == ["123", "4"]
    assert texts(build_tokenizer(byte_level(**{"tokenizer.ggml.pre": "smollm"})), "123") == ["1", "2", "3"]
    dbrx, qwen = (build_tokenizer(byte_level(**{"tokenizer.ggml.pre": pre})).pre_tokenizer for pre in ("dbrx", "qwen2"))
    assert [piece for piece, _ in dbrx.pre_tokenize_str("12345")] == ["123", "45"]
    assert [piece for piece, _ in qwen.pre_tokenize_str("12345")] == ["1", "2", "3", "4", "5"]


def test_afmoe_groups_digits_from_the_right():
    cut = build_tokenizer(byte_level(**{"tokenizer.ggml.pre": "afmoe"})).pre_tokenizer.pre_tokenize_str
    for length in range(1, 12):
        digits, first = "123456789876"[:length], length % 3
        groups = [digits[:first], *(digits[place : place + 3] for place in range(first, length, 3))]
        assert [piece for piece, _ in cut(f"x{digits}y")] == ["x", *filter(None, groups), "y"]
    assert len(cut("1" * 200_000)) == 66_667


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("glm4", ["myURL", " isn", "'t", " ", "123", "45", ".\n\n", "你好ab"]),
        ("stablelm2", ["myURL", " isn", "'t", " ", *"12345", ".\n\n", "你好ab"]),
        ("qwen35", ["myURL", " isn", "'t", " ", *"12345", ".\n\n", "你好ab"]),
        ("gpt-4o", ["my", "URL", " isn't", " ", "123", "45", ".\n\n", "你好ab"]),
        ("kimi-k2", ["my", "URL", " isn't", " ", "123", "45", ".\n\n", "你好", "ab"]),
        ("afmoe", ["myURL", " isn", "'t", " ", "12", "345", ".\n\n", "你好", "ab"]),
        ("deepseek-v3", ["myURL", " isn", "'t", " ", "123", "45", ".\n\n", "你好", "ab"]),
        ("bailingmoe2", ["myURL", " isn", "'t", " ", *"12345", ".\n\n", "你好ab"]),
        ("seed-coder", ["myURL", " isn", "'t", " ", *"12345", ".", "\n\n", "你好ab"]),
        ("exaone-moe", ["myURL isn", "'t", " ", *"12345", ".\n", "\n", "你好ab"]),
        ("exaone4", ["myURL", " isn", "'t", " 12345", ".", "\n", "\n", "你好ab"]),
        ("command-r", ["myURL", " isn", "'t", " ", *"12345", ".", "\n", "\n", "你好ab"]),
    ],
)
def test_a_text_is_cut_as_the_file_names_it(pre, pieces):
    """The patterns are those of the models' own tokenizer.json."""
    text = "".join(pieces)
    cut = build_tokenizer(byte_level(**{"tokenizer.ggml.pre": pre})).pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in cut] == pieces


def test_gemma_4_merges_what_the_file_lists():
    """Unlike SentencePiece, whose merges follow from the tokens."""
    metadata = SENTENCE_PIECE | {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": [f"{MARK} a"]}
    tokenizer = build_tokenizer(metadata)
    assert texts(tokenizer, "ab ab") == ["<s>", "a", "b", f"{MARK}a", "b"]
    assert tokenizer.decode(tokenizer.encode("ab ab").ids) == "ab ab"


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (["a" * length for length in range(1, 1001)], "form more than 32032 pairs, 32 a token"),
        (["a", "a" * 1025], "a token of 1025 characters; at most 1024 are read"),
    ],
)
def test_a_vocabulary_whose_pairs_would_fill_the_memory_is_refused(tokens, reason):
    tokens = ["<unk>", *tokens]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
    }
    tracemalloc.start()
    try:
        with pytest.raises(GgufTokenizerError, match=reason):
            build_tokenizer(metadata)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_what_is_blank_behind_tokens_of_phi3_falls_away():
    """As its template has it: each of a message's tokens ends a line."""
    text = "<|tool|>\nab<|tool|>\n<s>\na"
    phi, phi4, other = (
        build_tokenizer(metadata | {"general.architecture": architecture})
        for metadata, architecture in ((SENTENCE_PIECE, "phi3"), (byte_level(), "phi3"), (SENTENCE_PIECE, "llama"))
    )
    line = [MARK, "<0x0A>"]

    def texts(tokenizer: Tokenizer, text: str) -> list[str]:
        """By their numbers: what is said of a token has what is blank behind it, too."""
        return [tokenizer.id_to_token(index) for index in tokenizer.encode(text).ids]

    assert texts(phi, text) == ["<s>", "<|tool|>", f"{MARK}ab", "<|tool|>", "<s>", *line, "a"]
    assert texts(other, text) == ["<s>", "<|tool|>", *line, "ab", "<|tool|>", *line, "<s>", *line, "a"]
    assert len(texts(phi4, "<|end|> 1")) == 1 + len(texts(phi4, "<|end|>1"))


def test_begin_and_end_tokens_follow_the_file():
    none = build_tokenizer(byte_level(**{"tokenizer.ggml.add_bos_token": False}))
    assert texts(none, "12<|end|>") == ["12", "<|end|>"]
    both = {"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.eos_token_id": 0}
    assert texts(build_tokenizer(byte_level(**both)), "12") == ["<|end|>", "12", "<|end|>"]


def test_sentence_pieces_merge_by_score():
    tokenizer = build_tokenizer(SENTENCE_PIECE)
    assert texts(tokenizer, "ab ab") == ["<s>", f"{MARK}ab", f"{MARK}ab"]
    assert texts(tokenizer, "abc") == ["<s>", f"{MARK}ab", "c"]  # a better score than abc's
    assert texts(tokenizer, "a<|tool|>é")[1:4] == [f"{MARK}a", "<|tool|>", MARK]
    for text in ("ab c", "naïve ab 東京", "  a"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        (byte_level(**{"tokenizer.ggml.pre": "hopscotch"}), "pre-tokenizer is 'hopscotch'.*llama-bpe"),
        (byte_level(**{"tokenizer.ggml.model": "rwkv"}), "is 'rwkv'; supported are gpt2, llama and gemma4"),
        (byte_level(**{"tokenizer.ggml.merges": None}), r"no list tokenizer\.ggml\.merges"),
        (byte_level(**{"tokenizer.ggml.merges": ["1 9999"]}), "cannot be built"),
        (byte_level(**{"tokenizer.ggml.token_type": [1]}), "types of them"),
        (byte_level(**{"tokenizer.ggml.tokens": ["a", "a"]}), "contains a token twice"),
        ({}, r"no list tokenizer\.ggml\.tokens"),
        (SENTENCE_PIECE | {"tokenizer.ggml.scores": [0.0]}, "and 1 scores"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_names_the_remedy(metadata, says):
    with pytest.raises(GgufTokenizerError, match=rf"{says}.*--tokenizer-path"):
        build_tokenizer(metadata)


def test_templates_of_all_names_are_found():
    settings = tokenizer_settings({"tokenizer.chat_template": "one", "tokenizer.chat_template.tool_use": "two"})
    assert settings["chat_template"] == [
        {"name": "default", "template": "one"},
        {"name": "tool_use", "template": "two"},
    ]


def test_a_file_describes_what_its_directory_describes(box):
    file, directory = ModelFiles(resolve_model_path(str(box))), ModelFiles(MODEL_DIR)
    assert file.chat_template(None) == directory.chat_template(None)
    assert set(file.eos_token_ids()) == set(directory.eos_token_ids())
    assert (file.context_length, file.vocab_size) == (directory.context_length, directory.vocab_size)
    assert file.architecture == directory.architecture
    codec, other = TextCodec(file), TextCodec(directory)
    assert codec.special_tokens == other.special_tokens
    assert codec.pieces.additive
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<think>"
    assert codec.encode(text) == other.encode(text)


def test_defaults_of_sampling_come_from_the_file(tiny_model, tmp_path):
    def change(writer):
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 7)

    files = ModelFiles(write_gguf(tiny_model, tmp_path / "model.gguf", change=change))
    assert files.generation_config == {"eos_token_id": [2, 0], "temperature": 0.5, "top_k": 7}


def test_other_files_are_refused(tmp_path, box):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelPathError, match=r"or a \.gguf file"):
        resolve_model_path(str(tmp_path / "model.bin"))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(box.read_bytes()[:3000])
    with pytest.raises(ModelPathError, match="cut short or damaged"):
        ModelFiles(cut)


def test_a_tokenizer_may_come_from_a_file_or_go_with_one(tmp_path, tiny_model, box):
    assert TextCodec(ModelFiles(tiny_model, tokenizer_path=box)).encode("<|im_end|>") == [2]
    strange = write_gguf(tiny_model, tmp_path / "strange.gguf", pre="hopscotch")
    with pytest.raises(ModelPathError, match=r"strange\.gguf.*hopscotch"):
        TextCodec(ModelFiles(strange))
    codec = TextCodec(ModelFiles(strange, tokenizer_path=tiny_model))
    assert codec.encode("fox") == TextCodec(ModelFiles(tiny_model)).encode("fox")


def test_the_engines_process_needs_no_heavy_library(box):
    code = (
        "import sys; from pathlib import Path; from actors.text.model_files import ModelFiles;"
        "from actors.text.text_codec import TextCodec; TextCodec(ModelFiles(Path(sys.argv[1])));"
        "print(sorted({'torch', 'transformers', 'gguf'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(box)], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


async def test_an_engine_serves_a_file(tmp_path):
    model = make_tiny_model(tmp_path / "model")
    file = write_gguf(model, tmp_path / "model.Q8_0.gguf", "Q8_0")
    async with small_engine(file) as engine:
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        deltas = [delta async for delta in engine.generate("The quick brown fox", params)]
    assert sum(len(delta.token_ids) for delta in deltas) == 8
    assert "".join(delta.text for delta in deltas)
