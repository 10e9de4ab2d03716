"""HealthBoard: loads and ages that actors write and the engine reads without a message.

A health probe must not wait in a mailbox.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from actors.boards.suspects import Verdict
from actors.protocol import CacheUsage, GroupUsage, SchedulerLoad
from kernels.contract.info import ModelInfo
from kernels.contract.step import Rebalanced, StepResult
from telemetry.metrics.steps import StepMetrics, StepShape

__all__ = ["HealthBoard", "HealthBoards"]


class HealthBoard:
    """The board of one replica. Times are the system clock's seconds."""

    def __init__(self, counted: StepMetrics | None = None, replica: int = 0) -> None:
        self.worker: tuple[ModelInfo, int] | None = None  # set by the engine when a worker has loaded; (info, epoch)
        self.scheduler: SchedulerLoad | None = None
        self.read_cache: Callable[[], CacheUsage] | None = None  # set by the cache manager
        # Set by the scheduler: returns the sequences in the steps that the worker had at this time.
        self.read_batch: Callable[[float], tuple[int, ...]] | None = None
        # Set by the scheduler: returns the verdict on the death of the worker in this epoch.
        self.attribute_death: Callable[[int], Verdict] | None = None
        self.resident_adapters: tuple[int, ...] = ()  # numbers of the LoRA adapters on the device
        self._deaths: dict[int, float] = {}  # time of death by epoch, of workers that had loaded
        self._last_death: int | None = None  # the epoch that ended last; None if its worker had not loaded
        self._loaded = 0.0  # when the scheduler last wrote its load
        self._counted = counted or StepMetrics()
        self.replica = replica
        self._sent: deque[StepShape] = deque()  # the steps without a result
        self.rebalanced: Rebalanced | None = None  # the last time that experts were placed anew
        self.rebalances = self.moved_experts = 0
        self._counted_until = 0.0  # of the time in which there was such a step

    @property
    def steps(self) -> int:
        """Number of steps with a result."""
        return self._counted.steps

    @property
    def step_run_seconds(self) -> float:
        """Seconds of model and sampling, in all steps."""
        return self._counted.run_seconds

    @property
    def output_tokens(self) -> int:
        """Output tokens of all steps."""
        return self._counted.generated_tokens

    @property
    def oldest_step_sent(self) -> float | None:
        """When the oldest step without a result was sent."""
        return self._sent[0].sent if self._sent else None

    def step_sent(self, shape: StepShape) -> None:
        shape.replica = self.replica
        if not self._sent:
            self._counted_until = shape.sent
        self._sent.append(shape)

    def step_finished(self, now: float, result: StepResult, generated: int) -> None:
        """Record the result of the oldest step. ``generated``: its output tokens."""
        if result.drafted:
            drafted, produced = (memoryview(part).cast("i").tolist() for part in (result.drafted, result.accepted))
            self._counted.speculation.verified(drafted, produced, result.timing.draft)
        if result.adapters is not None:
            self.resident_adapters = result.adapters
        if result.rebalanced is not None:
            self.rebalanced = result.rebalanced
            self.rebalances += 1
            self.moved_experts += result.rebalanced.moved
        if self._sent:
            self._counted.had_steps(self.replica, now - self._counted_until)
            self._counted_until = now
            self._counted.answered(
                self._sent.popleft(),
                now,
                generated=generated,
                graph_rows=result.timing.graph_rows,
                divided=result.timing.divided,
                queued=result.timing.queued,
                prepare=result.timing.prepare,
                run=result.timing.run,
            )

    def stage_ran(self, worker: str, seconds: float) -> None:
        """Record that a worker computed its part of a step; 0: it is no stage of a pipeline, or does not know."""
        if seconds:
            self._counted.stage_ran(self.replica, worker, seconds)

    def worker_lost(self, at: float) -> None:
        """Record that the worker died; its steps will have no result. ``at``: when that was first known."""
        self._last_death = None if self.worker is None else self.worker[1]
        if self.worker is not None:
            self._deaths[self.worker[1]] = at
        self.worker = None
        self.resident_adapters = ()
        self.forget_steps()

    @property
    def has_loaded(self) -> bool:
        """Whether a worker has ever loaded, though it may have died since."""
        return self.worker is not None or bool(self._deaths)

    def last_death_counts(self) -> bool:
        """Whether the worker's last death counts towards the restart intensity."""
        if self.attribute_death is None or self._last_death is None:
            return True
        return self.attribute_death(self._last_death).counts

    def died_at(self, epoch: int) -> float | None:
        """When the worker of ``epoch`` died; None while it is alive."""
        return self._deaths.get(epoch)

    def forget_steps(self) -> None:
        """Forget the steps in flight: they will have no result."""
        self._sent.clear()
        self._counted.interrupted(self.replica)

    def load(self, load: SchedulerLoad, now: float) -> None:
        self.scheduler, self._loaded = load, now

    def progress_age(self, now: float) -> float:
        """Seconds since the last step ended while there is work; 0 without work and in a pause."""
        load = self.scheduler
        if load is None or load.paused or not load.running + load.waiting:
            return 0.0
        return load.last_step_age + max(0.0, now - self._loaded)

    def step_age(self, now: float) -> float:
        """Seconds since the oldest step without a result was sent; 0 without one."""
        sent = self.oldest_step_sent
        return 0.0 if sent is None else max(0.0, now - sent)

    def cache(self) -> CacheUsage | None:
        return self.read_cache() if self.read_cache is not None else None


class HealthBoards:
    """The boards of all replicas as one. All ``boards`` share one StepMetrics."""

    def __init__(self, boards: Sequence[HealthBoard]) -> None:
        self.all = tuple(boards)

    @property
    def worker(self) -> tuple[ModelInfo, int] | None:
        """Worker of the first replica whose workers have loaded; None while no replica can run a step."""
        return next((board.worker for board in self.all if board.worker is not None), None)

    @property
    def scheduler(self) -> SchedulerLoad | None:
        """The sum of all schedulers' loads, with the largest of their ages; paused if one is."""
        loads = [board.scheduler for board in self.all if board.scheduler is not None]
        if len(loads) < 2:
            return loads[0] if loads else None
        return SchedulerLoad(
            **{name: sum(getattr(load, name) for load in loads) for name in _LOAD_SUMS},
            last_step_age=max(load.last_step_age for load in loads),
            paused=any(load.paused for load in loads),
        )

    @property
    def steps(self) -> int:
        return self.all[0].steps

    @property
    def step_run_seconds(self) -> float:
        return self.all[0].step_run_seconds

    @property
    def output_tokens(self) -> int:
        return self.all[0].output_tokens

    @property
    def resident_adapters(self) -> tuple[int, ...]:
        """Those of all replicas; one that lies on two devices is there twice."""
        return tuple(index for board in self.all for index in board.resident_adapters)

    @property
    def oldest_step_sent(self) -> float | None:
        return min((board.oldest_step_sent for board in self.all if board.oldest_step_sent is not None), default=None)

    def progress_age(self, now: float) -> float:
        return max(board.progress_age(now) for board in self.all)

    def step_age(self, now: float) -> float:
        return max(board.step_age(now) for board in self.all)

    def cache(self) -> CacheUsage | None:
        """The summed usage of all caches."""
        usages = [usage for board in self.all if (usage := board.cache()) is not None]
        if len(usages) < 2:
            return usages[0] if usages else None
        groups = zip(*(usage.bounded for usage in usages), strict=True)
        return CacheUsage(
            page_size=usages[0].page_size,
            bounded=tuple(_sum_groups(group) for group in groups),
            **{name: sum(getattr(usage, name) for usage in usages) for name in _USAGE_SUMS},
        )


def _sum_groups(groups: Sequence[GroupUsage]) -> GroupUsage:
    """The summed usage of one bounded group in all replicas."""
    return GroupUsage(groups[0].kind, **{name: sum(getattr(group, name) for group in groups) for name in _GROUP_SUMS})


_LOAD_SUMS = tuple(name for name in SchedulerLoad.__struct_fields__ if name not in ("last_step_age", "paused"))
_USAGE_SUMS = tuple(name for name in CacheUsage.__struct_fields__ if name not in ("page_size", "bounded"))
_GROUP_SUMS = tuple(name for name in GroupUsage.__struct_fields__ if name != "kind")
