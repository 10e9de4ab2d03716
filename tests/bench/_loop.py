"""Measure a step in the engine's loop: all actors that take part, and a worker's process."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

from actors.boards.health_board import HealthBoard
from actors.boards.journal import Journal, JournalEntry
from actors.boards.stream_buffer import StreamBuffer
from actors.caching.cache_manager import CacheManager
from actors.protocol import (
    DetokenizerProtocol,
    Emit,
    FlushOutputs,
    SequenceSpec,
    Submit,
    WorkerConfig,
    WorkerReady,
)
from actors.protocol.requests import SamplingParams
from actors.runtime import Actor, ActorSystem, handles
from actors.scheduling import PlannerConfig
from actors.scheduling.scheduler import Scheduler, SchedulerLinks
from actors.workers.group import WorkerGroup
from kernels.contract.config import RunnerConfig
from kernels.contract.info import ModelInfo
from kernels.contract.step import SlotSampling
from kernels.contract.topology import WorkerId
from telemetry.timeline import Timelines
from tests.bench._costless import DELAY, costless_workers

__all__ = ["step_cost"]

_PROMPT = 16


class _Steps:
    """Counts steps; a caller can wait for a number of them."""

    def __init__(self) -> None:
        self.count = 0
        self._wanted = 0
        self._there = asyncio.Event()

    def add(self) -> None:
        self.count += 1
        if self.count >= self._wanted:
            self._there.set()

    async def until(self, count: int) -> None:
        self._wanted = count
        self._there.clear()
        async with asyncio.timeout(120):
            await self._there.wait()


class _Drain(Actor[DetokenizerProtocol]):
    """A detokenizer that drops its messages."""

    def __init__(self, steps: _Steps) -> None:
        self._steps = steps

    @handles
    def emit(self, message: Emit) -> None:
        self._steps.add()

    @handles
    def flush(self, message: FlushOutputs) -> None:
        """Do nothing: nothing is pending."""


async def step_cost(rows: int, steps: int) -> float:
    """Processor seconds that a decode step of ``rows`` takes in this process."""
    loaded: asyncio.Future[tuple[ModelInfo, int]] = asyncio.get_running_loop().create_future()
    journal, board, timelines, done = Journal(), HealthBoard(), Timelines(), _Steps()
    config = PlannerConfig(
        max_running=rows, max_slots=rows + 1, step_tokens=rows * _PROMPT, max_prefill_tokens=rows * _PROMPT
    )
    with costless_workers():
        async with ActorSystem() as system:
            group = WorkerGroup(
                system,
                [WorkerId(0)],
                address=None,
                configure=lambda worker: WorkerConfig(RunnerConfig("", max_slots=rows + 1)),
                on_refused=lambda reason, permanent: loaded.set_exception(RuntimeError(reason)),
                on_progress=lambda stage, fraction: None,
                on_loaded=lambda info, epoch: loaded.set_result((info, epoch)),
            )
            await group.spawn(lambda worker: {DELAY: "0"}, standby=False)
            cache = await system.spawn(lambda: CacheManager(board), name="cache")
            detokenizer = await system.spawn(lambda: _Drain(done), name="detokenizer")
            scheduler = await system.spawn(
                lambda: Scheduler(
                    config,
                    SchedulerLinks(cache, detokenizer, group.workers[WorkerId(0)]),
                    journal=journal,
                    board=board,
                    step_timeout=60.0,
                ),
                name="scheduler",
            )
            info, epoch = await loaded
            board.worker = (info, epoch)
            await scheduler.tell(WorkerReady(info=info, epoch=epoch))
            specs = tuple(_spec(number) for number in range(1, rows + 1))
            for spec in specs:
                timeline = timelines.open(str(spec.sequence), operation="text_completion", model="")
                buffer = StreamBuffer(timeline, 1)
                journal.open(JournalEntry(spec.sequence, 0, spec, SamplingParams(), buffer, timeline, [0], []))
            await scheduler.tell(Submit(sequences=specs))
            await done.until(50)
            first, cpu = done.count, time.process_time()
            await done.until(first + steps)
            return (time.process_time() - cpu) / (done.count - first)


def _spec(number: int) -> SequenceSpec:
    prompt: Any = np.full(_PROMPT, number, np.int32)
    return SequenceSpec(sequence=number, prompt=prompt.tobytes(), sampling=SlotSampling(), max_tokens=1 << 19)
