"""The Worker actor: one per device, in a process of its own. It runs the model, or its part of one, and owns the
device's state by slot.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from actors.faults import FaultInjector
from actors.protocol import Load, LoadProgress, LoadRefused, Step, WorkerConfig, WorkerLoaded, WorkerProtocol
from actors.runtime import Actor, Answered, Later, RequestError, handles_in_thread
from kernels.step import ModelInfo, RunnerConfig, StepResult
from telemetry.worker_spans import TracedRow, WorkerSpan, forward_spans, guess_spans

if TYPE_CHECKING:
    from kernels.answers import RunningStep
    from kernels.runner import ModelRunner

__all__ = ["StaleStep", "Worker"]

_log = logging.getLogger("troupe.worker")


class StaleStep(RequestError):
    """The step speaks of slots of an earlier life of this worker."""


class Worker(Actor[WorkerProtocol]):
    """The model runs in the actor's thread, the mailbox in another: the next step is already here when this one ends,
    and a stop is heard while one runs, or while a rank waits for its peers.

    Where the device works by itself, a third thread waits for it, and the next step is prepared while this one runs.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._faults = FaultInjector(config.faults) if config.faults else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: ThreadPoolExecutor | None = None
        self._runner: ModelRunner | None = None
        self._epoch: int | None = None  # of the life of the group that this one has loaded for
        self._rested = 0.0, 0.0  # when what a step with guesses left to do was begun and done
        self._answered = 0.0  # when the last step was

    @classmethod
    def prepare(cls, config: WorkerConfig) -> None:
        """Import torch, the model's code and what the settings of its checkpoint and of its draft are read by: the most
        of a start, and all of it that needs no device."""
        _import_runner(config)
        from kernels.quantization.recognise import import_ahead

        import_ahead(config.runner.model_path, config.runner.config_overrides)
        speculation = config.runner.speculation
        if speculation is not None and speculation.draft_model_path:
            import_ahead(speculation.draft_model_path)

    async def started(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="troupe-results")

    async def stopping(self) -> None:
        if self._waiting is not None:
            self._waiting.shutdown(wait=True, cancel_futures=True)
        if self._runner is not None:
            self._runner.close()

    @handles_in_thread
    def load(self, message: Load, sent: float) -> None:
        if message.incarnation != self.context.incarnation:
            return
        assert self._loop is not None

        def progress(stage: str, fraction: float) -> None:
            self.context.parent_tell(LoadProgress(stage=stage, fraction=fraction))

        progress("import", 0.0)
        config = msgspec.structs.replace(self._config.runner, rendezvous=message.rendezvous)
        limit = self._config.load_timeout
        late = RuntimeError(f"the model was not loaded within {limit:g} s: raise --model-load-timeout if it goes on")
        timer = threading.Timer(limit, self._loop.call_soon_threadsafe, (self.context.crash, late))
        timer.daemon = True
        timer.start()
        try:
            info = self._load(config, progress)
        except Exception as error:
            permanent = _is_permanent(error)
            if permanent is None:
                raise
            _log.debug("The model was not loaded.", exc_info=error)
            refused = LoadRefused(reason=str(error), permanent=permanent, epoch=message.epoch)
            self.context.parent_tell(refused)
            return
        finally:
            timer.cancel()
        self._epoch = message.epoch
        self.context.parent_tell(WorkerLoaded(info=info, epoch=message.epoch))

    def _load(self, config: RunnerConfig, progress: Callable[[str, float], None]) -> ModelInfo:
        self._runner = _import_runner(self._config)(config, progress)
        info = self._runner.load()
        if config.npu_simulator:
            info = msgspec.structs.replace(info, device=f"{config.device} (simulated {config.npu_simulator})")
        return info

    @handles_in_thread
    def step(self, message: Step, sent: float) -> StepResult | Answered[StepResult] | Later[StepResult]:
        """A step that nobody waits for any more runs all the same: others follow it."""
        if message.epoch != self._epoch:
            raise StaleStep(f"Step {message.batch.number} is of life {message.epoch}, this is {self._epoch}.")
        assert self._runner is not None
        assert self._waiting is not None
        batch, begun = message.batch, time.monotonic()
        (first, last), self._rested = self._rested, (0.0, 0.0)
        waited = max(0.0, last - max(first, sent))
        if self._faults is not None:
            self._faults.strike_step(batch)
        step = self._runner.start(batch)
        if step.done:
            result = self._finish(step, batch.traces, sent, begun, waited)
            if step.rest is None:
                return result
            return Answered(result, partial(self._rest, step.rest) if result.drafted else step.rest)
        return self._waiting.submit(self._finish, step, batch.traces, sent, begun, waited)

    def _rest(self, rest: Callable[[], None]) -> None:
        begun = time.monotonic()
        rest()
        self._rested = begun, time.monotonic()

    def _finish(
        self, step: RunningStep, traces: tuple[TracedRow, ...], sent: float, begun: float, waited: float
    ) -> StepResult:
        """``waited``: seconds for what a step with guesses left to do.

        What a step takes is told from the answer before it, if it was here by then: that is what it keeps others from,
        all that is around the model with it.
        """
        result, rank = step.result(), self._config.runner.tp_rank
        if rank:  # every rank has the same tokens, and who asks needs them once
            result = StepResult(result.number, accepted=b"", tokens=b"")
        now = time.monotonic()
        since, self._answered = max(sent, self._answered), now
        timing = msgspec.structs.replace(result.timing, queued=max(0.0, begun - sent))
        if timing.whole:
            timing = msgspec.structs.replace(timing, whole=now - since, seen=timing.seen + waited)
        result = msgspec.structs.replace(result, timing=timing)
        if not traces:
            return result
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
        return msgspec.structs.replace(result, spans=spans)


def _guesses(spans: tuple[WorkerSpan, ...], result: StepResult) -> tuple[WorkerSpan, ...]:
    """What a step's traces tell of its guesses."""
    drafted, produced = memoryview(result.drafted).cast("i"), memoryview(result.accepted).cast("i")
    accepted = sum(tokens - 1 for guesses, tokens in zip(drafted, produced, strict=True) if guesses and tokens)
    return guess_spans(spans, result.timing.draft, result.timing.run, sum(drafted), accepted)


def _is_permanent(error: Exception) -> bool | None:
    """Whether a refusal of the runner meets every later start too; None for an error that is no refusal."""
    from kernels.load_error import LoadError
    from kernels.models.config import ConfigError
    from kernels.platforms.base import PlatformError
    from kernels.sizing import CacheSizeError

    if isinstance(error, CacheSizeError):
        return False
    return True if isinstance(error, ConfigError | LoadError | PlatformError) else None


def _import_runner(config: WorkerConfig) -> type[ModelRunner]:
    # torch is imported here, in the worker's process, and nowhere else.
    if config.runner.npu_simulator:
        from kernels.npu.simulator.activate import activate

        activate(config.runner.npu_simulator)  # before anybody imports torch
    from kernels.runner import ModelRunner

    runner: type[ModelRunner] = ModelRunner
    return runner
