"""The greedy answers of one GGUF file in llama.cpp and here, and what is between them where they differ.

    PATH=$PATH:.../llama.cpp/bin python -m tests.bench gguf_answers [--kinds Q8_0 Q4_0 Q4_K_M]

llama.cpp rounds what goes into each product to 8 bits in blocks; here it stays float32. Of each answer that differs the
first token that does: by how much llama.cpp, this engine, and this engine with inputs rounded as llama.cpp's are,
prefer llama.cpp's token to ours, in nats. ``apart``: the largest difference of log-probabilities of the tokens that
both chose before.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.text.model_files import ModelFiles
from actors.text.text_codec import TextCodec
from kernels.contract.config import RunnerConfig
from kernels.contract.step import SlotSampling
from kernels.devices.cpu.dense_linear import PlainLinear
from kernels.execution.runner import ModelRunner
from tests.bench._options import command_line
from tests.kits.driver import Driver
from tests.kits.llama_server import SERVER, MissingTool, serve, write_as

__all__ = ["BLOCKS", "DECIDED", "LENGTH", "OPEN", "answer", "main", "prefers", "prompt_of", "rounded_inputs"]

DECIDED = ("What is the capital of France?", "What is the capital of Japan?", "What is the capital of Norway?")
OPEN = ("Tell me a story about a fox.", "Name three colours.", "How much is 7 plus 5?")
QUESTIONS = DECIDED + OPEN
LENGTH = 24
ENDS = (0, 2)
BLOCKS = {"Q4_K_M": 256}
"""Inputs that llama.cpp rounds by one scale, where they are not 32."""
_SCORED = SlotSampling(temperature=0.0, prompt_logprobs=0)


def prompt_of(codec: TextCodec, question: str) -> list[int]:
    return codec.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")


def answer(tokens: list[int]) -> list[int]:
    """The tokens up to the first end token."""
    return next((tokens[:place] for place, token in enumerate(tokens) if token in ENDS), tokens)


@contextmanager
def rounded_inputs(block: int) -> Iterator[None]:
    """Round inputs of all products to int8 with a scale for each ``block``, inside the context."""
    plain = PlainLinear.__call__

    def rounding(self: PlainLinear, x: torch.Tensor) -> torch.Tensor:
        size = block if x.shape[1] % block == 0 else 32
        parts = x.unflatten(1, (-1, size))
        scales = parts.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        return plain(self, ((parts / scales).round() * scales).flatten(1))

    PlainLinear.__call__ = rounding  # type: ignore[method-assign]
    try:
        yield
    finally:
        PlainLinear.__call__ = plain  # type: ignore[method-assign]


def _likelihoods(driver: Driver, prompt: list[int], output: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Log-probabilities of ``output`` after ``prompt``."""
    driver.admit(1, prompt + output, sampling=_SCORED)
    result = driver.step([(1, len(prompt) + len(output))])
    driver.release(1)
    return np.frombuffer(result.prompt_logprobs, np.float32)[len(prompt) - 1 :]


def prefers(driver: Driver, prompt: list[int], before: list[int], first: int, second: int) -> float:
    """Log-probability of ``first`` minus that of ``second`` after ``prompt`` and ``before``, in nats."""
    one, other = (float(_likelihoods(driver, prompt, [*before, token])[-1]) for token in (first, second))
    return one - other


def main(argv: list[str] | None = None) -> None:
    parser = command_line(__name__, __doc__)
    parser.add_argument(
        "--kinds", nargs="*", default=["Q8_0", "Q4_0", "Q4_K_M"], help="of the file, by llama.cpp's names"
    )
    given = parser.parse_args(argv)
    if SERVER is None:
        sys.exit("llama-server must be on the PATH; build llama.cpp first")
    print("| file | question | tokens alike | llama.cpp | here | here, inputs rounded | apart |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        for kind in given.kinds:
            try:
                file = write_as(kind, Path(directory))
            except MissingTool as error:
                print(f"| {kind} | skipped: {error} | | | | | |", flush=True)
            else:
                _compare(kind, file)


def _compare(kind: str, file: Path) -> None:
    runner = ModelRunner(RunnerConfig(model_path=str(file), dtype="float32", max_total_tokens=4096, max_slots=3))
    driver, codec, alike = Driver(runner, runner.load()), TextCodec(ModelFiles(file)), 0
    with serve(file) as client:
        for question in QUESTIONS:
            prompt = prompt_of(codec, question)
            body = {"prompt": prompt, "n_predict": LENGTH, "temperature": 0, "return_tokens": True, "n_probs": 16}
            answered = client.post("/completion", json=body).json()
            driver.admit(1, prompt)
            found = answer(driver.generate(1, len(prompt) + LENGTH)[len(prompt) :])
            driver.release(1)
            expected = answer(answered["tokens"])
            pairs = enumerate(zip(found, expected, strict=False))
            place = next((at for at, pair in pairs if pair[0] != pair[1]), min(len(found), len(expected)))
            rows = [
                {one["id"]: one["logprob"] for one in row["top_logprobs"]}
                for row in answered["completion_probabilities"]
            ]
            theirs = [rows[at][token] for at, token in enumerate(expected[:place])]
            ours = _likelihoods(driver, prompt, expected[:place]) if place else np.zeros(0)
            apart = float(np.abs(ours - theirs).max()) if place else 0.0
            if found == expected:
                alike += 1
                print(f"| {kind} | {question} | all {place} | | | | {apart:.3f} |", flush=True)
                continue
            their, own = (tokens[place] if place < len(tokens) else ENDS[-1] for tokens in (expected, found))
            here = prefers(driver, prompt, found[:place], their, own)
            with rounded_inputs(BLOCKS.get(kind, 32)):
                rounded = prefers(driver, prompt, found[:place], their, own)
            gap = rows[place][their] - rows[place].get(own, float("-inf"))
            print(
                f"| {kind} | {question} | {place} | {gap:+.3f} | {here:+.3f} | {rounded:+.3f} | {apart:.3f} |",
                flush=True,
            )
    print(f"| {kind} | alike | {alike} of {len(QUESTIONS)} | | | | |", flush=True)
