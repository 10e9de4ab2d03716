"""Runs a model whose results are vectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kernels.contract.config import RunnerConfig
from kernels.contract.info import ModelInfo
from kernels.contract.runner import open_runner
from kernels.contract.step import Admission, SlotSampling, StepBatch
from kernels.contract.tasks import Task
from tests.kits.driver import pack

__all__ = ["inputs", "run"]

LENGTHS = (1, 7, 33, 7, 60)
SCORED = SlotSampling(temperature=0.0, logprobs=0)


def inputs(seed: int = 3, vocab: int = 211) -> list[list[int]]:
    """Inputs of several lengths."""
    generator = np.random.default_rng(seed)
    return [generator.integers(2, vocab, length).tolist() for length in LENGTHS]


def run(
    path: Path, prompts: Sequence[Sequence[int]], task: Task | Sequence[Task], chunk: int = 0, **options: Any
) -> tuple[ModelInfo, list[np.ndarray]]:
    """The vector of each prompt. ``task``: of all, or of each. ``chunk``: tokens of a prompt in a step; 0: all."""
    runner = open_runner(
        RunnerConfig(
            str(path), **({"dtype": "float32", "max_total_tokens": 4096, "max_slots": 9, "threads": 1} | options)
        )
    )
    info = runner.load()
    tasks = list(task) if isinstance(task, Sequence) else [task] * len(prompts)
    pages = iter(range(1, info.num_pages))
    admitted = tuple(
        Admission(
            slot,
            1,
            pack(prompt),
            len(prompt),
            0,
            pack(next(pages) for _ in range(-(-len(prompt) // info.page_size))),
            SCORED,
            task=own,
        )
        for slot, (prompt, own) in enumerate(zip(prompts, tasks, strict=True), 1)
    )
    left = {slot: len(prompt) for slot, prompt in enumerate(prompts, 1)}
    found: dict[int, np.ndarray] = {}
    number = 0
    while left:
        counts = {slot: min(chunk or count, count) for slot, count in left.items()}
        order = sorted(counts, key=lambda slot: counts[slot] != 1)
        number += 1
        result = runner.run(
            StepBatch(
                number,
                pack(order),
                pack([1] * len(order)),
                pack(counts[slot] for slot in order),
                admitted=admitted if number == 1 else (),
            )
        )
        assert not result.failed
        sizes = np.frombuffer(result.pooled_sizes, np.int32)
        vectors = np.split(np.frombuffer(result.pooled, np.float32), np.cumsum(sizes)[:-1]) if len(sizes) else []
        found |= {
            order[row]: vec for row, vec in zip(np.frombuffer(result.pooled_rows, np.int32), vectors, strict=True)
        }
        left = {slot: count - counts[slot] for slot, count in left.items() if count > counts[slot]}
    runner.close()
    return info, [found[slot] for slot in sorted(found)]
