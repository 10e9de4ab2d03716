"""Compares models of transformers' modeling code over the paged cache with transformers itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from kernels.contract.config import RunnerConfig
from kernels.contract.step import SlotSampling, StepResult
from kernels.execution.runner import ModelRunner
from tests.kits.driver import Driver
from tests.kits.tiny_architectures import VOCAB

__all__ = ["drive_code", "greatest_difference"]

_ALL = SlotSampling(temperature=0.0, logprobs=VOCAB, prompt_logprobs=VOCAB)


def drive_code(path: Path, **options: Any) -> Driver:
    """A driver of the model in ``path``, by transformers' code."""
    sizes: dict[str, Any] = {"max_slots": 8, "max_total_tokens": 1024, "page_size": 8, "max_step_tokens": 128}
    config = RunnerConfig(
        model_path=str(path), **{"dtype": "float32", "threads": 1, "model_impl": "transformers"} | sizes | options
    )
    runner = ModelRunner(config)
    return Driver(runner, runner.load())


def greatest_difference(model: Any, driver: Driver) -> float:
    """The greatest difference of log-probabilities from those of ``model``, by the prompt of a request that runs in
    chunks beside others, and by all decoded tokens: how far each is from the argmax."""
    generator = random.Random(3)
    prompts = [[generator.randrange(3, VOCAB) for _ in range(length)] for length in (33, 5, 17)]
    found = []
    driver.admit(1, prompts[0], sampling=_ALL)
    found.append(_prompt(driver.step([(1, 9)]), 9))
    driver.admit(2, prompts[1])
    found.append(_prompt(driver.step([(1, 16), (2, 5)]), 16))
    driver.admit(3, prompts[2])
    result = driver.step([(2, 1), (1, 8), (3, 10)])
    found += [_prompt(result, 7), _table(result.top_ids, result.top_logprobs, 1)]
    for _ in range(6):
        result = driver.step([(slot, driver.pending(slot)) for slot in (1, 2, 3)])
        assert not result.failed
    greatest = float(np.abs(np.concatenate(found) - _logprobs(model, prompts[0])).max())
    for slot, prompt in enumerate(prompts, start=1):
        tokens = driver.tokens[slot]
        expected = _logprobs(model, tokens)
        for place in range(len(prompt), len(tokens)):
            before = expected[place - 1]
            greatest = max(greatest, float(before.max() - before[tokens[place]]))
    return greatest


def _logprobs(model: Any, tokens: list[int]) -> Any:
    import torch

    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float().log_softmax(-1).numpy()


def _prompt(result: StepResult, rows: int) -> Any:
    return _table(result.prompt_top_ids, result.prompt_top_logprobs, rows)


def _table(ids: bytes, logprobs: bytes, rows: int) -> Any:
    found = np.full((rows, VOCAB), np.nan, dtype=np.float32)
    order = np.frombuffer(ids, dtype=np.int32).reshape(rows, VOCAB)
    np.put_along_axis(found, order, np.frombuffer(logprobs, dtype=np.float32).reshape(rows, VOCAB), axis=1)
    return found
