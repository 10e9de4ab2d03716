"""A step as two batches gives what it gives as one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kernels.contract.errors import ConfigError
from kernels.contract.step import SlotSampling, StepBatch
from kernels.core.attention_rows import AttentionRows
from kernels.distributed.turns import pass_turn
from kernels.execution.executors import two_batches


def divided(threshold: float, *parts: tuple[int, int], decodes: int = 0) -> list[list[tuple[int, int, int]]] | None:
    """(row, start, count) of the rows of each part."""
    starts, counts = np.array(parts, dtype=np.int64).T
    pages = np.arange(len(parts), dtype=np.int32).reshape(-1, 1)
    found = AttentionRows(starts, counts, pages, decodes).divided(threshold)
    if found is None:
        return None
    assert sum(rows.decodes for rows, _ in found) == decodes
    for rows, index in found:
        assert rows.pages[:, 0].tolist() == index.tolist()
    return [list(zip(index.tolist(), rows.starts.tolist(), rows.counts.tolist(), strict=True)) for rows, index in found]


def test_steps_are_divided_between_rows_or_inside_one() -> None:
    assert divided(0.4, (0, 50), (7, 60)) == [[(0, 0, 50)], [(1, 7, 60)]]
    assert divided(0.48, (0, 50), (7, 60)) == [[(0, 0, 50), (1, 7, 5)], [(1, 12, 55)]]
    assert divided(0.48, (3, 9)) == [[(0, 3, 4)], [(0, 7, 5)]]
    assert divided(0.48, (8, 1), (9, 1), (0, 10), decodes=2) == [[(0, 8, 1), (1, 9, 1), (2, 0, 4)], [(2, 4, 6)]]
    assert divided(0.48, *[(5, 1)] * 3, (0, 2), decodes=3) == [[(0, 5, 1), (1, 5, 1)], [(2, 5, 1), (3, 0, 2)]]


def test_without_a_threshold_no_row_is_cut() -> None:
    assert divided(0.0, (0, 4), (7, 60)) == [[(0, 0, 4)], [(1, 7, 60)]]
    assert divided(0.0, (0, 64)) is None


def turning(run: Callable[..., Any]) -> Callable[..., Any]:
    """A layer before which the other batch has its turn, as if ranks added something up there."""

    def turned(*given: Any) -> Any:
        pass_turn()
        return run(*given)

    return turned


NAMES = ["qwen3", "qwen2-window", "qwen3-moe-some", "deepseek-v3", "gemma4", "longcat-flash"]


@pytest.mark.parametrize("name", NAMES)
def test_two_batches_give_the_tokens_of_one(name, reference, drive, prompts, monkeypatch):
    """Of prompts that are cut and not, of chunks beside a decode, and of a prompt whose tokens are scored."""
    monkeypatch.setattr(two_batches, "_MIN_TOKENS", 12)
    found = []
    for threshold in (None, 0.48):
        driver = drive(reference(name).path, seed=3, two_batch_threshold=threshold)
        for kind in {type(layer) for layer in driver.runner._loaded.model.layers} if threshold else ():
            monkeypatch.setattr(kind, "__call__", turning(kind.__call__))
        results = []
        for slot, prompt in enumerate(prompts(60, 70, 40, 30), start=1):
            scored = 1 if slot == 4 else -1
            driver.admit(slot, prompt, sampling=SlotSampling(temperature=0.0, prompt_logprobs=scored))
        for rows in ([(1, 60), (2, 70)], [(1, 1), (3, 25)], [(1, 1), (2, 1)], [(3, 15), (4, 30)], [(2, 1), (4, 1)]):
            results.append(driver.step(rows))
        assert [result.timing.divided for result in results] == [
            threshold is not None and i in (0, 1, 3) for i in range(5)
        ]
        found.append(driver.tokens)
    assert found[0] == found[1]


@pytest.mark.parametrize("counts", [[], [1, 1, 30], [1] * 600], ids=["none", "few", "decodes"])
def test_the_rows_of_other_steps_are_left_to_other_executors(counts: list[int]) -> None:
    nothing = np.zeros(len(counts), dtype=np.int32).tobytes()
    batch = StepBatch(1, slots=nothing, generations=nothing, counts=np.array(counts, dtype=np.int32).tobytes())
    context: Any = SimpleNamespace(loaded=SimpleNamespace(device=SimpleNamespace(bind_thread=None)))
    step: Any = SimpleNamespace(batch=batch)  # without rows
    assert two_batches.TwoBatches(context, 0.48).execute(step) is None


@pytest.mark.parametrize("name", ["qwen3-next"])
def test_a_model_that_keeps_more_than_pages_is_refused(name, reference, drive):
    with pytest.raises(ConfigError, match=r"cannot run as two batches.*leave --enable-two-batch-overlap out"):
        drive(reference(name).path, two_batch_threshold=0.48)
