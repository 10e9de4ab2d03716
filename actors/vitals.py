"""Signs of life that actors write down and the engine reads without asking: a probe must not wait in a mailbox."""

from __future__ import annotations

from collections.abc import Callable

from actors.protocol import CacheUsage, SchedulerLoad
from kernels.step import ModelInfo, StepResult

__all__ = ["Vitals"]


class Vitals:
    """One engine's board. Times are the system clock's seconds."""

    def __init__(self) -> None:
        self.worker: tuple[ModelInfo, int] | None = None  # set by the engine when a worker has loaded; (info, epoch)
        self.scheduler: SchedulerLoad | None = None
        self.read_cache: Callable[[], CacheUsage] | None = None  # set by the cache manager
        self.read_batch: Callable[[], tuple[int, ...]] | None = None  # set by the scheduler: sequences in a step
        self.steps = 0
        self.step_run_seconds = 0.0
        self.oldest_step_sent: float | None = None  # of the steps without an answer
        self._sent: list[float] = []

    def step_sent(self, now: float) -> None:
        self._sent.append(now)
        self.oldest_step_sent = self._sent[0]

    def step_finished(self, now: float, result: StepResult) -> None:
        self.steps += 1
        self.step_run_seconds += result.timing.run
        if self._sent:
            self._sent.pop(0)
        self.oldest_step_sent = self._sent[0] if self._sent else None

    def worker_lost(self) -> None:
        """The worker's life ended; its steps will not be answered."""
        self.worker = None
        self.forget_steps()

    def forget_steps(self) -> None:
        """Nobody waits for the steps without an answer any more."""
        self._sent.clear()
        self.oldest_step_sent = None

    def load(self, load: SchedulerLoad) -> None:
        self.scheduler = load

    def step_age(self, now: float) -> float:
        """Seconds the oldest unanswered step has been out; 0 when the device owes nothing."""
        return 0.0 if self.oldest_step_sent is None else now - self.oldest_step_sent

    def cache(self) -> CacheUsage | None:
        return self.read_cache() if self.read_cache is not None else None
