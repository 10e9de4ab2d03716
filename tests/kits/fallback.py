"""Compares models of transformers' modeling code over the paged cache with transformers itself.

``python -m tests.kits.fallback`` writes the table of all types of models, which the documentation and a test read.
"""

from __future__ import annotations

import json
import logging
import random
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from kernels.contract.config import RunnerConfig
from kernels.contract.errors import ConfigError
from kernels.contract.step import SlotSampling, StepResult
from kernels.execution.runner import ModelRunner
from kernels.models.fallback.model import config
from tests.kits.driver import Driver
from tests.kits.tiny_architectures import VOCAB, architectures, save_config, save_tiny

__all__ = ["RUNS", "TABLE", "compare", "drive_code", "greatest_difference", "measure", "refusal_of"]

TABLE = Path(__file__).with_name("fallback_models.json")
RUNS = "runs"

_ALL = SlotSampling(temperature=0.0, logprobs=VOCAB, prompt_logprobs=VOCAB)


def drive_code(path: Path, **options: Any) -> Driver:
    """A driver of the model in ``path``, by transformers' code."""
    sizes: dict[str, Any] = {"max_slots": 8, "max_total_tokens": 1024, "page_size": 8, "max_step_tokens": 128}
    settings = RunnerConfig(
        model_path=str(path), **{"dtype": "float32", "threads": 1, "model_impl": "transformers"} | sizes | options
    )
    runner = ModelRunner(settings)
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
    for _ in range(3):
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


def measure(kind: str, directory: Path) -> str:
    """What becomes of a small model of type ``kind``: "runs", or the reason why it is refused. Raises AssertionError
    where its results are not transformers', and what transformers raises where the sizes do not fit."""
    refusal = refusal_of(kind, directory / "sizes")
    if refusal:
        return refusal
    compare(kind, directory / "model")
    return RUNS


def compare(kind: str, directory: Path) -> None:
    """Raises AssertionError where the results of a small model of type ``kind`` are not transformers', and ConfigError
    where it is refused."""
    model = save_tiny(kind, directory)
    difference = greatest_difference(model, drive_code(directory))
    assert difference < 1e-3, f"{kind} differs by {difference}"


def refusal_of(kind: str, directory: Path) -> str:
    """Why a small model of type ``kind`` is refused; "" where it is not."""
    save_config(kind, directory)
    try:
        config(directory, json.loads((directory / "config.json").read_text()))
    except ConfigError as error:
        return str(error).partition(" (")[0].replace(str(directory), "the directory")
    return ""


def main() -> None:
    """Write the table of all types. Those whose small sizes do not fit are left out."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    table, classes = {}, architectures()
    for kind, name in sorted(classes.items()):
        with tempfile.TemporaryDirectory() as folder:
            try:
                table[kind] = {"architecture": name, "result": measure(kind, Path(folder))}
            except Exception as error:
                print(f"{kind}: {type(error).__name__}: {str(error)[:120]}".replace("\n", " "))
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(sum(entry["result"] == RUNS for entry in table.values()), "of", len(classes))


if __name__ == "__main__":
    main()
