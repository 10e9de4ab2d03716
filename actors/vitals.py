"""Signs of life that actors write down and the engine reads without asking: a probe must not wait in a mailbox."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from actors.protocol import CacheUsage, SchedulerLoad
from actors.scheduling.suspects import Verdict
from kernels.step import ModelInfo, StepResult
from telemetry.step_metrics import StepMetrics, StepShape

__all__ = ["Vitals"]


class Vitals:
    """One engine's board. Times are the system clock's seconds."""

    def __init__(self, counted: StepMetrics | None = None) -> None:
        self.worker: tuple[ModelInfo, int] | None = None  # set by the engine when a worker has loaded; (info, epoch)
        self.scheduler: SchedulerLoad | None = None
        self.read_cache: Callable[[], CacheUsage] | None = None  # set by the cache manager
        # Set by the scheduler: the sequences in steps that the worker had at this time.
        self.read_batch: Callable[[float], tuple[int, ...]] | None = None
        # Set by the scheduler: what the death of the worker's life with this epoch proves.
        self.judge: Callable[[int], Verdict] | None = None
        self._deaths: dict[int, float] = {}  # of workers that had loaded: when, by epoch
        self._last_death: int | None = None  # the epoch of the last life that ended; None if it had not loaded
        self._loaded = 0.0  # when the scheduler last said what it has
        self._counted = counted or StepMetrics()
        self._sent: deque[StepShape] = deque()  # the steps without an answer

    @property
    def steps(self) -> int:
        """Steps answered."""
        return self._counted.steps

    @property
    def step_run_seconds(self) -> float:
        """Of model and sampling, in all steps."""
        return self._counted.run_seconds

    @property
    def output_tokens(self) -> int:
        """Tokens that all steps gave to sequences."""
        return self._counted.generated_tokens

    @property
    def oldest_step_sent(self) -> float | None:
        """When the oldest step without an answer was sent."""
        return self._sent[0].sent if self._sent else None

    def step_sent(self, shape: StepShape) -> None:
        self._sent.append(shape)

    def step_finished(self, now: float, result: StepResult, generated: int) -> None:
        """The oldest step is answered; ``generated``: tokens it gave to sequences."""
        if result.drafted:
            drafted, produced = (memoryview(part).cast("i").tolist() for part in (result.drafted, result.accepted))
            self._counted.speculation.verified(drafted, produced, result.timing.draft)
        if self._sent:
            self._counted.answered(
                self._sent.popleft(),
                now,
                generated=generated,
                graph_rows=result.timing.graph_rows,
                queued=result.timing.queued,
                prepare=result.timing.prepare,
                run=result.timing.run,
            )

    def worker_lost(self, at: float) -> None:
        """The worker's life ended, which was first known ``at``; its steps will not be answered."""
        self._last_death = None if self.worker is None else self.worker[1]
        if self.worker is not None:
            self._deaths[self.worker[1]] = at
        self.worker = None
        self.forget_steps()

    def last_death_counts(self) -> bool:
        """Whether the worker's last death counts towards the restart intensity."""
        if self.judge is None or self._last_death is None:
            return True
        return self.judge(self._last_death).counts

    def died_at(self, epoch: int) -> float | None:
        """When the worker's life ``epoch`` ended; None while it goes on."""
        return self._deaths.get(epoch)

    def forget_steps(self) -> None:
        """Nobody waits for the steps without an answer any more."""
        self._sent.clear()
        self._counted.interrupted()

    def load(self, load: SchedulerLoad, now: float) -> None:
        self.scheduler, self._loaded = load, now

    def progress_age(self, now: float) -> float:
        """Seconds since the last step ended while there is work; 0 when there is none."""
        load = self.scheduler
        if load is None or not load.running + load.waiting:
            return 0.0
        return load.last_step_age + max(0.0, now - self._loaded)

    def step_age(self, now: float) -> float:
        """Seconds the oldest unanswered step has been out; 0 when the device owes nothing."""
        sent = self.oldest_step_sent
        return 0.0 if sent is None else max(0.0, now - sent)

    def cache(self) -> CacheUsage | None:
        return self.read_cache() if self.read_cache is not None else None
