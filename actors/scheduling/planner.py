"""The planner: turns queued sequences into steps and step results into emissions."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TypeAlias

import msgspec

from actors.protocol import (
    CacheTurn,
    CacheTurnDone,
    Emission,
    Lease,
    OpenSequence,
    PeekPrefixes,
    SchedulerLoad,
    SequenceSpec,
)
from actors.scheduling.config import PlannerConfig
from kernels.step import ModelInfo, StepBatch, StepResult

__all__ = ["CacheMessage", "CacheReply", "Planner", "StepPlan"]

CacheMessage: TypeAlias = OpenSequence | CacheTurn | PeekPrefixes
CacheReply: TypeAlias = Lease | CacheTurnDone | list[int]


class StepPlan(msgspec.Struct, frozen=True):
    """``batch``: to be sent to the worker; None when nothing can run. ``emissions``: sequences ended by planning."""

    batch: StepBatch | None
    emissions: list[Emission]


class Planner:
    """Sans-IO: it asks the cache by yielding messages and is told the time."""

    def __init__(self, config: PlannerConfig) -> None: ...

    def worker_ready(self, info: ModelInfo, now: float) -> list[Emission]:
        """A worker with empty slots and an empty cache: running sequences wait again. The caller resets the cache."""

    def submit(self, specs: Iterable[SequenceSpec], now: float) -> list[Emission]:
        """Queue sequences (known ones are left alone); returns those refused or already complete, ended."""

    def abort(self, sequences: Iterable[int]) -> list[Emission]: ...

    def text_stopped(self, sequences: Iterable[int]) -> None: ...

    def expire(self, now: float) -> list[Emission]: ...

    def plan(self, now: float) -> Generator[CacheMessage, CacheReply, StepPlan | None]:
        """The next step, or None when there is nothing to do now. Drive it to its end before any other call."""

    def finish_step(self, result: StepResult, now: float) -> list[Emission]: ...

    def load(self, now: float) -> SchedulerLoad: ...

    def sequences_in_flight(self) -> tuple[int, ...]:
        """Sequences with a row in a step that has no answer yet: the suspects when a worker dies."""

    def is_known(self, sequence: int) -> bool: ...

    @property
    def ready(self) -> bool: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def can_send(self) -> bool: ...

    @property
    def in_flight(self) -> int: ...
