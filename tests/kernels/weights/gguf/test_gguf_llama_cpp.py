"""The same file in llama.cpp and here: the same greedy tokens, and the same tokens of a text.

Runs where llama-server (and for Q4_K_M llama-quantize) is on the PATH.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import httpx
import pytest

from actors.text.model_files import ModelFiles
from actors.text.text_codec import TextCodec
from tests.bench.gguf_answers import BLOCKS, DECIDED, LENGTH, OPEN, answer, prefers, prompt_of, rounded_inputs
from tests.kits.gguf_writer import write_gguf
from tests.kits.llama_server import QUANTIZE, SERVER, serve, write_as
from tests.kits.tiny_model import make_tiny_model

pytestmark = pytest.mark.skipif(SERVER is None or QUANTIZE is None, reason="llama.cpp is not installed")

NEAR = 0.15
"""Nats."""
TEXTS = (
    "Hello, world! It's  12345 o'clock.\n\n\tTabs, and   spaces ",
    "Grüße, naïve café, 東京 🎭 don't WE'LL he'd",
    "<|im_start|>user\nhi<|im_end|>\n<think>\n\n</think> x<|endoftext|>",
    "a\r\nb\n \n c_d-e (f) [g] {h} 3.14 1,000\u00a0x",
)


@pytest.fixture(scope="module", params=["Q8_0", "Q4_0", "Q4_K_M"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def file(kind, tmp_path_factory):
    return write_as(kind, tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="module")
def llama(file) -> Iterator[httpx.Client]:
    with serve(file) as client:
        yield client


@pytest.fixture
def engine(file, drive):
    return TextCodec(ModelFiles(file)), drive(file, dtype="float32")


@pytest.mark.parametrize("question", DECIDED + OPEN)
def test_greedy_tokens_are_the_same(question, kind, llama, engine):
    """llama.cpp rounds what goes into a product to eight bits, so where both find two tokens all but equally likely
    either may come: then the same rounding moves ours towards llama.cpp's."""
    codec, driver = engine
    prompt = prompt_of(codec, question)
    body = {"prompt": prompt, "n_predict": LENGTH, "temperature": 0, "return_tokens": True, "n_probs": 16}
    reported = llama.post("/completion", json=body).json()
    driver.admit(1, prompt)
    found = answer(driver.generate(1, len(prompt) + LENGTH)[len(prompt) :])
    driver.release(1)
    expected = answer(reported["tokens"])
    assert len(found) > 2
    if found == expected or question in DECIDED:
        assert found == expected, (codec.decode(found), codec.decode(expected))
        return
    place = next(at for at, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1])
    own, their = found[place], expected[place]
    likely = {one["id"]: one["logprob"] for one in reported["completion_probabilities"][place]["top_logprobs"]}
    assert likely[their] - likely[own] < NEAR
    here = prefers(driver, prompt, found[:place], their, own)
    assert -NEAR < here < 0
    with rounded_inputs(BLOCKS.get(kind, 32)):
        assert prefers(driver, prompt, found[:place], their, own) > here


def test_texts_have_the_same_tokens(file, llama):
    codec = TextCodec(ModelFiles(file))
    for text in TEXTS:
        answer = llama.post("/tokenize", json={"content": text, "add_special": True, "parse_special": True})
        assert codec.encode(text) == answer.json()["tokens"], text


@pytest.mark.parametrize("name", ["parallel-moe", "parallel-shared"])
def test_a_mixture_of_experts_generates_the_same(name, reference, drive, tmp_path):
    """A token takes the same experts with the same weights, and the one that all take."""
    tiny = make_tiny_model(tmp_path / "tiny", vocab_size=212)
    model = tmp_path / "model"
    shutil.copytree(reference(name).path, model)
    for part in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / part, model / part)
    stored = json.loads((model / "tokenizer.json").read_text())
    stored["model"]["vocab"] = {token: place for token, place in stored["model"]["vocab"].items() if place < 212}
    stored["model"]["merges"] = stored["model"]["merges"][:1]
    (model / "tokenizer.json").write_text(json.dumps(stored))
    file = write_gguf(model, tmp_path / "model.gguf")
    prompt = list(range(5, 17))
    with serve(file) as client:
        body = {"prompt": prompt, "n_predict": LENGTH, "temperature": 0, "return_tokens": True, "ignore_eos": True}
        reported = client.post("/completion", json=body).json()["tokens"]
    driver = drive(file)
    driver.admit(1, prompt)
    assert driver.generate(1, len(prompt) + LENGTH)[len(prompt) :] == reported
