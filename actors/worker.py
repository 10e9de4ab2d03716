"""The Worker actor: one per device, in a process of its own. It runs the model, or its part of one, and owns the
device's state by slot.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import msgspec

from actors.faults import FaultInjector
from actors.protocol import Load, LoadProgress, Step, WorkerConfig, WorkerLoaded, WorkerProtocol
from actors.runtime import Actor, Deferred, RequestError, handles
from kernels.step import ModelInfo, RunnerConfig, StepBatch, StepResult
from telemetry.worker_spans import TracedRow, WorkerSpan, forward_spans, guess_spans

if TYPE_CHECKING:
    from kernels.answers import RunningStep
    from kernels.runner import ModelRunner

__all__ = ["StaleStep", "Worker"]

T = TypeVar("T")


class StaleStep(RequestError):
    """The step speaks of slots of an earlier life of this worker."""


class Worker(Actor[WorkerProtocol]):
    """The model runs in one thread, the mailbox in another: the next step is already here when this one ends.

    Where the device works by itself, a third thread waits for it, and the next step is prepared while this one runs.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._faults = FaultInjector(config.faults) if config.faults else None
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: ThreadPoolExecutor | None = None
        self._runner: ModelRunner | None = None
        self._epoch: int | None = None  # of the life of the group that this one has loaded for

    @classmethod
    def prepare(cls, config: WorkerConfig) -> None:
        """Import torch and the model's code: the most of a start, and all of it that needs no device."""
        _import_runner(config)

    async def started(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="troupe-model")
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="troupe-results")

    @handles
    def load(self, message: Load) -> None:
        if message.incarnation == self.context.incarnation:
            self.context.start_soon(self._come_up, message)

    async def _come_up(self, message: Load) -> None:
        """Load beside the mailbox: a rank that waits for its peers must hear that it is to stop."""
        loop = asyncio.get_running_loop()

        def progress(stage: str, fraction: float) -> None:
            loop.call_soon_threadsafe(self.context.parent_tell, LoadProgress(stage=stage, fraction=fraction))

        progress("import", 0.0)
        config = msgspec.structs.replace(self._config.runner, rendezvous=message.rendezvous)
        try:
            async with asyncio.timeout(self._config.load_timeout):
                info = await self._in_thread(lambda: self._load(config, progress))
        except TimeoutError:
            raise RuntimeError(f"the model was not loaded within {self._config.load_timeout:g} s") from None
        self._epoch = message.epoch
        self.context.parent_tell(WorkerLoaded(info=info, epoch=message.epoch))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        assert self._thread is not None
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def stopping(self) -> None:
        for thread in (self._thread, self._waiting):
            if thread is not None:
                thread.shutdown(wait=True, cancel_futures=True)
        if self._runner is not None:
            self._runner.close()

    def _load(self, config: RunnerConfig, progress: Callable[[str, float], None]) -> ModelInfo:
        self._runner = _import_runner(self._config)(config, progress)
        info = self._runner.load()
        if config.npu_simulator:
            info = msgspec.structs.replace(info, device=f"{config.device} (simulated {config.npu_simulator})")
        return info

    @handles
    def step(self, message: Step) -> Deferred[StepResult]:
        """Queue the step behind the one that runs; the reply follows when it is done."""
        if message.epoch != self._epoch:
            raise StaleStep(f"Step {message.batch.number} is of life {message.epoch}, this is {self._epoch}.")
        assert self._thread is not None
        answer: Future[StepResult] = Future()
        queued = self._thread.submit(self._start, message.batch, answer, time.monotonic())
        queued.add_done_callback(lambda queued: answer.cancel() if queued.cancelled() else None)
        return asyncio.wrap_future(answer)

    def _start(self, batch: StepBatch, answer: Future[StepResult], arrived: float) -> None:
        """In the model's thread. A step that nobody waits for any more runs all the same: others follow it."""
        assert self._runner is not None
        assert self._waiting is not None
        begun = time.monotonic()
        try:
            if self._faults is not None:
                prefills = any(memoryview(batch.counts).cast("i")[row] > 1 for row in range(len(batch.counts) // 4))
                self._faults.strike("prefill" if prefills or batch.admitted else "decode")
            step = self._runner.start(batch)
            if step.done:
                self._settle(answer, step, batch.traces, arrived, begun)
            else:
                self._waiting.submit(self._settle, answer, step, batch.traces, arrived, begun)
        except BaseException as error:
            _refuse(answer, error)

    def _settle(
        self,
        answer: Future[StepResult],
        step: RunningStep,
        traces: tuple[TracedRow, ...],
        arrived: float,
        begun: float,
    ) -> None:
        try:
            result, rank = step.result(), self._config.runner.tp_rank
            timing = msgspec.structs.replace(result.timing, queued=begun - arrived)
            if rank:  # every rank has the same tokens, and who asks needs them once
                result = StepResult(result.number, accepted=b"", tokens=b"")
            else:
                result = msgspec.structs.replace(result, timing=timing)
            if traces:
                spans = forward_spans(
                    traces,
                    begun,
                    time.monotonic(),
                    step=result.number,
                    rank=rank,
                    queued_seconds=timing.queued,
                    prepare_seconds=timing.prepare,
                    device_seconds=timing.run,
                )
                if result.drafted:
                    spans += _guesses(spans, result)
                result = msgspec.structs.replace(result, spans=spans)
            if answer.set_running_or_notify_cancel():
                answer.set_result(result)
        except BaseException as error:
            _refuse(answer, error)


def _guesses(spans: tuple[WorkerSpan, ...], result: StepResult) -> tuple[WorkerSpan, ...]:
    """What a step's traces tell of its guesses."""
    drafted, produced = memoryview(result.drafted).cast("i"), memoryview(result.accepted).cast("i")
    accepted = sum(tokens - 1 for guesses, tokens in zip(drafted, produced, strict=True) if guesses and tokens)
    return guess_spans(spans, result.timing.draft, result.timing.run, sum(drafted), accepted)


def _refuse(answer: Future[StepResult], error: BaseException) -> None:
    if answer.set_running_or_notify_cancel():
        answer.set_exception(error)


def _import_runner(config: WorkerConfig) -> type[ModelRunner]:
    # torch is imported here, in the worker's process, and nowhere else.
    if config.runner.npu_simulator:
        from kernels.npu.simulator.activate import activate

        activate(config.runner.npu_simulator)  # before anybody imports torch
    from kernels.runner import ModelRunner

    runner: type[ModelRunner] = ModelRunner
    return runner
