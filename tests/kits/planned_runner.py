"""Planner, prefix cache and runner together, without actors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from actors.caching import PrefixCache
from actors.protocol import SequenceSpec
from actors.scheduling import Planner, PlannerConfig
from actors.scheduling.testing import drive
from kernels.contract.config import RunnerConfig
from kernels.contract.step import SlotSampling, StepBatch
from kernels.execution.runner import ModelRunner

__all__ = ["GREEDY", "PAGE", "Line", "make_runner", "pack"]

GREEDY = SlotSampling(temperature=0.0)
PAGE = 4


def pack(values: Sequence[int]) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()


def make_runner(model: Path, **options: Any) -> tuple[ModelRunner, Any]:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "max_total_tokens": 1024,
        "max_slots": 9,
        "threads": 1,
        "page_size": PAGE,
    }
    runner = ModelRunner(RunnerConfig(model_path=str(model), **(defaults | {"max_step_tokens": 256} | options)))
    return runner, runner.load()


class Line:
    """Planner and prefix cache before a runner.

    ``outputs``: the tokens of each request; ``cached``: of its prompt; ``max_used``: pages of each bounded group.
    """

    def __init__(self, model: Path, runner: dict[str, Any] | None = None, **config: Any) -> None:
        self.config = PlannerConfig(**({"max_running": 6, "max_slots": 9, "step_tokens": 20} | config))
        self._model, self._options = model, {"max_step_tokens": self.config.step_tokens} | (runner or {})
        self.planner = Planner(self.config)
        self.outputs: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self.ends: list[int] = []
        self.max_used: list[int] = []
        self.start_worker()

    def start_worker(self) -> None:
        self.runner, self.info = make_runner(self._model, **self._options)
        self.cache = PrefixCache(self.info.num_pages, self.info.page_size, bounded=self.info.bounded_groups)
        self.sent: list[StepBatch] = []
        self.planner.worker_ready(self.info, 0.0)

    def submit(self, number: int, prompt: Sequence[int], count: int, **fields: Any) -> None:
        self.outputs[number] = []
        spec = SequenceSpec(
            sequence=number, prompt=pack(prompt), sampling=GREEDY, max_tokens=count, arrival=float(number), **fields
        )
        self.planner.submit([spec], 0.0)

    def step(self) -> bool:
        while self.planner.can_send:
            plan = drive(self.planner.plan(0.0), self.cache)
            self.cache.check()
            if plan is None:
                break
            assert not plan.outputs
            assert plan.batch is not None
            self.sent.append(plan.batch)
        usage = self.cache.usage().bounded
        self.max_used = [
            max(pair) for pair in zip(self.max_used or [0] * len(usage), (g.used for g in usage), strict=True)
        ]
        if not self.sent:
            return False
        result = self.runner.run(self.sent.pop(0))
        assert not result.failed
        for output in self.planner.finish_step(result, 0.0):
            self.outputs[output.sequence] += output.tokens
            self.cached[output.sequence] = output.cached_tokens
            self.ends += [output.sequence] * (output.ended is not None)
        return True

    def play(self) -> None:
        while self.step():
            pass
        assert not self.planner.has_work
        usage = self.cache.usage()
        assert usage.used == 0
        assert all(group.used == 0 for group in usage.bounded)
        assert sorted(self.ends) == sorted(self.outputs)
