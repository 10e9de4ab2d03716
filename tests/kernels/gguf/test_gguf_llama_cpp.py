"""The same file in llama.cpp and here: the same greedy tokens, and the same tokens of a text.

Runs where llama-server (and for Q4_K_M llama-quantize) is on the PATH.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

import httpx
import pytest

from actors.model_files import ModelFiles
from actors.text_codec import TextCodec
from app.understudy import MODEL_DIR
from tests.gguf_writer import write_gguf

SERVER, QUANTIZE = shutil.which("llama-server"), shutil.which("llama-quantize")
pytestmark = pytest.mark.skipif(SERVER is None or QUANTIZE is None, reason="llama.cpp is not installed")

DECIDED = ("What is the capital of France?", "What is the capital of Japan?", "What is the capital of Norway?")
OPEN = ("Tell me a story about a fox.", "Name three colours.", "How much is 7 plus 5?")
NEAR = 0.15
"""Nats."""
TEXTS = (
    "Hello, world! It's  12345 o'clock.\n\n\tTabs, and   spaces ",
    "Grüße, naïve café, 東京 🎭 don't WE'LL he'd",
    "<|im_start|>user\nhi<|im_end|>\n<think>\n\n</think> x<|endoftext|>",
    "a\r\nb\n \n c_d-e (f) [g] {h} 3.14 1,000\u00a0x",
)
LENGTH = 24
ENDS = (0, 2)


@pytest.fixture(scope="module", params=["Q8_0", "Q4_0", "Q4_K_M"])
def file(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("gguf")
    if request.param != "Q4_K_M":
        return write_gguf(MODEL_DIR, directory / f"box.{request.param}.gguf", request.param)
    whole = write_gguf(MODEL_DIR, directory / "box.gguf")
    made = directory / f"box.{request.param}.gguf"
    subprocess.run([str(QUANTIZE), whole, made, request.param, "1"], check=True, capture_output=True)
    return made


@pytest.fixture(scope="module")
def llama(file) -> Iterator[httpx.Client]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(SERVER), "-m", str(file), "--port", str(port), "-c", "1024", "-t", "1", "-np", "1"]
    command += ["-ctk", "f32", "-ctv", "f32", "-fa", "off"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
            deadline = time.monotonic() + 60
            while not _ready(client):
                assert server.poll() is None, "llama-server ended"
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield client
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def engine(file, drive):
    return TextCodec(ModelFiles(file)), drive(file, dtype="float32")


def _ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("question", DECIDED + OPEN)
def test_greedy_tokens_are_the_same(question, file, llama, engine):
    """llama.cpp rounds what goes into a product to eight bits, so where it finds two tokens all but equally likely
    either may come."""
    codec, driver = engine
    prompt = codec.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    body = {"prompt": prompt, "n_predict": LENGTH, "temperature": 0, "return_tokens": True, "n_probs": 8}
    answer = llama.post("/completion", json=body).json()
    driver.admit(1, prompt)
    found = _answer(driver.generate(1, len(prompt) + LENGTH)[len(prompt) :])
    driver.release(1)
    expected = _answer(answer["tokens"])
    assert len(found) > 2
    if found != expected and question in OPEN:
        place = next(at for at, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1])
        likely = {one["id"]: one["logprob"] for one in answer["completion_probabilities"][place]["top_logprobs"]}
        assert likely[expected[place]] - likely[found[place]] < NEAR
    else:
        assert found == expected, (codec.decode(found), codec.decode(expected))


def _answer(tokens: list[int]) -> list[int]:
    """Up to the first that ends it."""
    return next((tokens[:place] for place, token in enumerate(tokens) if token in ENDS), tokens)


def test_texts_have_the_same_tokens(file, llama):
    codec = TextCodec(ModelFiles(file))
    for text in TEXTS:
        answer = llama.post("/tokenize", json={"content": text, "add_special": True, "parse_special": True})
        assert codec.encode(text) == answer.json()["tokens"], text
