"""A worker that costs nothing, and a server around it, so that a benchmark measures the actors alone.

    python -m tests.bench._costless DELAY [arguments of the server]

The worker is Troupe's own, in its process and with its threads and messages; its model runner
returns the same token for every row, ``DELAY`` seconds after a step begins, one step after the other; for embeddings
a vector of ``VECTOR_SIZE`` numbers.
"""

from __future__ import annotations

import cProfile
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from actors.protocol import WorkerConfig
from actors.runtime import ActorSystem
from actors.workers.worker import Worker
from kernels.contract.config import RunnerConfig
from kernels.contract.info import ModelInfo
from kernels.contract.step import StepBatch, StepResult, StepTiming
from kernels.contract.tasks import Embed

__all__ = [
    "CONTEXT",
    "DELAY",
    "TOKEN",
    "TOKEN_TEXT",
    "VECTOR_SIZE",
    "CostlessRunner",
    "CostlessWorker",
    "costless_workers",
    "main",
]

DELAY = "TROUPE_BENCH_DELAY"  # seconds, in the worker's environment
TOKEN, TOKEN_TEXT = 102, b"~"  # of the included model
CONTEXT = 1 << 20
VECTOR_SIZE = 1024
_PAGES = 1 << 20


class CostlessRunner:
    """A runner that keeps how many tokens of each slot are known and how many have run."""

    def __init__(self, config: RunnerConfig, delay: float) -> None:
        self._delay = delay
        self._free_at = 0.0
        self._known = np.zeros(config.max_slots, np.int64)
        self._computed = np.zeros(config.max_slots, np.int64)
        self._page_size = config.page_size
        self._embeds = np.zeros(config.max_slots, np.bool_)
        self._vector = np.random.default_rng(0).standard_normal(VECTOR_SIZE, np.float32).tobytes()

    def load(self) -> ModelInfo:
        return ModelInfo(
            architecture="Costless",
            dtype="none",
            device="none",
            vocab_size=4096,
            context_length=CONTEXT,
            layers=0,
            parameters=0,
            weight_bytes=0,
            num_pages=_PAGES,
            page_size=self._page_size,
            cache_bytes=0,
            load_seconds={},
        )

    def start(self, batch: StepBatch) -> CostlessStep:
        for admission in batch.admitted:
            self._known[admission.slot] = len(admission.tokens) // 4
            self._computed[admission.slot] = admission.computed
            self._embeds[admission.slot] = isinstance(admission.task, Embed)
        slots = np.frombuffer(batch.slots, np.int32)
        self._computed[slots] += np.frombuffer(batch.counts, np.int32)
        sampled = self._computed[slots] == self._known[slots]
        self._known[slots] += sampled
        accepted = sampled.astype(np.int32)
        pooled = np.flatnonzero(sampled & self._embeds[slots]).astype(np.int32)
        result = StepResult(
            number=batch.number,
            accepted=accepted.tobytes(),
            tokens=np.full(int(accepted.sum()), TOKEN, np.int32).tobytes(),
            timing=StepTiming(run=self._delay),
            pooled_rows=pooled.tobytes(),
            pooled_sizes=np.full(len(pooled), VECTOR_SIZE, np.int32).tobytes(),
            pooled=self._vector * len(pooled),
        )
        self._free_at = max(self._free_at, time.monotonic()) + self._delay
        return CostlessStep(result, self._free_at)

    def close(self) -> None:
        """Do nothing: the runner holds no resources."""


class CostlessStep:
    """A step that is done at a given moment (``time.monotonic``)."""

    idle_work = None
    stage_seconds = 0.0

    def __init__(self, result: StepResult, at: float) -> None:
        self._result = result
        self._at = at
        self.done = at <= time.monotonic()

    def result(self) -> StepResult:
        if (left := self._at - time.monotonic()) > 0:
            time.sleep(left)
        return self._result


class CostlessWorker(Worker):
    """The worker's shell around :class:`CostlessRunner`; torch is never imported."""

    @classmethod
    def prepare(cls, config: WorkerConfig) -> None:
        """Do nothing: there is nothing to import."""

    def _load(self, config: RunnerConfig, progress: Callable[[str, float], None]) -> ModelInfo:
        runner: Any = CostlessRunner(config, float(os.environ[DELAY]))
        self._runner = runner
        return runner.load()


@contextmanager
def costless_workers() -> Iterator[None]:
    """Replace workers by costless ones inside the context; their environment sets :data:`DELAY`."""
    spawn: Any = ActorSystem.spawn_process
    room: Any = ActorSystem

    async def spawn_costless(self: ActorSystem, *arguments: Any, name: str, target: str, **keywords: Any) -> Any:
        if target == "actors.workers.worker:Worker":
            target = "tests.bench._costless:CostlessWorker"
            keywords.pop("launcher", None)  # that has PyTorch
        return await spawn(self, *arguments, name=name, target=target, **keywords)

    room.spawn_process = spawn_costless
    try:
        yield
    finally:
        room.spawn_process = spawn


def main(argv: list[str]) -> int:
    """``troupe serve`` with costless workers; TROUPE_BENCH_PROFILE names a file for a profile of this process."""
    from app.cli.command import main as troupe

    os.environ[DELAY] = argv[0]
    profile = os.environ.get("TROUPE_BENCH_PROFILE")
    with costless_workers():
        if not profile:
            return troupe(["serve", *argv[1:]])
        profiler = cProfile.Profile()
        try:
            status: int = profiler.runcall(troupe, ["serve", *argv[1:]])
            return status
        finally:
            profiler.dump_stats(profile)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
