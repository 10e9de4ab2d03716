"""Worker: runs one rank of the model in a child process, and keeps the state of the slots on the device."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from actors.faults import FaultInjector
from actors.protocol import (
    CompileGrammar,
    Load,
    LoadAdapter,
    LoadProgress,
    LoadRefused,
    NumberedAdapter,
    Step,
    UnloadAdapter,
    WorkerConfig,
    WorkerLoaded,
    WorkerProtocol,
)
from actors.runtime import Actor, Deferred, EarlyReply, Later, RequestError, handles, handles_in_thread
from kernels.contract.adapters import ADAPTER_FILES
from kernels.contract.config import RunnerConfig
from kernels.contract.errors import CacheSizeError, ConfigError, LoadError, UnsupportedError
from kernels.contract.info import ModelInfo
from kernels.contract.runner import Runner, RunningStep, import_runner, open_runner
from kernels.contract.step import StepBatch, StepResult
from telemetry.traces.worker_spans import WorkerSpan, draft_spans, forward_spans

__all__ = ["StaleStep", "Worker"]

_log = logging.getLogger("troupe.worker")


class StaleStep(RequestError):
    """The step names slots of an earlier epoch."""


def _let_others_run_first() -> None:
    """Give this thread the lowest priority; only on Linux, since elsewhere it would be that of the whole process."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


class Worker(Actor[WorkerProtocol]):
    """The model runs in the actor's thread, the mailbox in another. So the next step has already arrived when one ends,
    and a stop is noticed while a step runs or a rank waits for its peers. For an asynchronous device, a third thread
    waits for results while the next step is prepared. Adapters are read in one of their own.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._faults = FaultInjector(config.faults) if config.faults else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._result_thread: ThreadPoolExecutor | None = None
        self._adapter_thread: ThreadPoolExecutor | None = None
        self._runner: Runner | None = None
        self._epoch: int | None = None  # the group's epoch when this worker loaded
        self._idle_work = 0.0, 0.0  # begin and end of the last idle work
        self._answered = 0.0  # when the last result was sent
        self._load_ended = threading.Event()
        self._adapters: set[int] = set()  # loaded ones, by number
        self._reading: set[int] = set()  # those that are asked for and not loaded yet
        self._leaving: set[int] = set()  # those of them that are unloaded once no slot uses them
        self._resident: tuple[int, ...] = ()  # those on the device, as last reported

    @classmethod
    def prepare(cls, config: WorkerConfig) -> None:
        """Import torch, the model's code and the readers of its checkpoint: most of the start that needs no device."""
        import_runner(config.runner)

    async def started(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._result_thread = ThreadPoolExecutor(1, thread_name_prefix="troupe-results")
        self._adapter_thread = ThreadPoolExecutor(
            1, thread_name_prefix="troupe-adapters", initializer=_let_others_run_first
        )

    async def stopping(self) -> None:
        self._load_ended.set()
        for thread in (self._result_thread, self._adapter_thread):
            if thread is not None:
                thread.shutdown(wait=True, cancel_futures=True)
        if self._runner is not None:
            self._runner.close()

    @handles_in_thread
    def load(self, message: Load, sent: float) -> None:
        if message.incarnation != self.context.incarnation:
            return
        try:
            self._load_all(message)
        finally:
            self._load_ended.set()

    def _load_all(self, message: Load) -> None:
        """The model, then its adapters."""
        assert self._loop is not None

        def progress(stage: str, fraction: float) -> None:
            self.context.parent_tell(LoadProgress(worker=self._config.worker, stage=stage, fraction=fraction))

        progress("import", 0.0)
        config = msgspec.structs.replace(self._config.runner, rendezvous=message.rendezvous)
        limit = self._config.load_timeout
        late = RuntimeError(
            f"the model was not loaded within {limit:g} s: raise --model-load-timeout if it is only slow"
        )
        timer = threading.Timer(limit, self._loop.call_soon_threadsafe, (self.context.crash, late))
        timer.daemon = True
        timer.start()
        try:
            info = self._load(config, progress)
            failed = self._load_adapters(message.adapters, strict=message.epoch == 0)
        except Exception as error:
            permanent = _is_permanent(error)
            if permanent is None:
                raise
            _log.debug("The model was not loaded.", exc_info=error)
            refused = LoadRefused(
                worker=self._config.worker, reason=str(error), permanent=permanent, epoch=message.epoch
            )
            self.context.parent_tell(refused)
            return
        finally:
            timer.cancel()
        self._epoch = message.epoch
        loaded = WorkerLoaded(worker=self._config.worker, info=info, epoch=message.epoch, failed=failed)
        self.context.parent_tell(loaded)

    def _load(self, config: RunnerConfig, progress: Callable[[str, float], None]) -> ModelInfo:
        self._runner = open_runner(config, progress)
        info = self._runner.load()
        if config.npu_simulator:
            info = msgspec.structs.replace(info, device=f"{config.device} (simulated {config.npu_simulator})")
        return info

    def _load_adapters(self, adapters: Sequence[NumberedAdapter], *, strict: bool) -> dict[int, str]:
        """``strict``: raise the error of an adapter; otherwise return it with its number and go on without it."""
        assert self._runner is not None
        failed: dict[int, str] = {}
        for adapter in adapters:
            try:
                self._runner.load_adapter(adapter.index, self._files_of(adapter))
            except Exception as error:  # of any kind: the model runs on without this adapter
                is_known = isinstance(error, ConfigError | UnsupportedError)
                reason = str(error) if is_known else f"{type(error).__name__}: {error}"
                if strict:
                    raise ConfigError(f"adapter {adapter.name}: {reason}") from error
                failed[adapter.index] = reason
            else:
                self._adapters.add(adapter.index)
        return failed

    def _files_of(self, adapter: NumberedAdapter) -> str:
        """The directory of an adapter on this node, after a download where only node 0 has it. Blocks."""
        if not adapter.source or Path(adapter.path).is_dir():
            return adapter.path
        from huggingface_hub import snapshot_download

        name, _, revision = adapter.source.partition("@")
        folder = self._config.download_dir
        return snapshot_download(name, revision=revision or None, cache_dir=folder, allow_patterns=list(ADAPTER_FILES))

    @handles
    def load_adapter(self, message: LoadAdapter) -> str | Deferred[str]:
        """Load an adapter in another thread, beside running steps. A worker whose model is being loaded answers after
        that; if it was not loaded, the adapter comes with the next Load."""
        adapter = message.adapter
        if adapter.index in self._adapters:
            return ""

        def load() -> str:
            self._load_ended.wait()
            try:
                if self._epoch is not None and adapter.index not in self._adapters:
                    self._load_adapters((adapter,), strict=True)
            except ConfigError as error:
                self._leaving.discard(adapter.index)
                return str(error)
            finally:
                self._reading.discard(adapter.index)
            return ""

        assert self._adapter_thread is not None
        self._reading.add(adapter.index)
        return asyncio.wrap_future(self._adapter_thread.submit(load))

    @handles_in_thread
    def unload_adapter(self, message: UnloadAdapter, sent: float) -> None:
        """A slot is released by the step after the end of its request, so that it may still use the adapter. One that
        is still being read is unloaded once it is."""
        if message.index in self._adapters or message.index in self._reading:
            self._adapters.discard(message.index)
            self._leaving.add(message.index)
            self._unload_adapters()

    def _unload_adapters(self) -> None:
        if self._runner is None:
            return
        for index in tuple(self._leaving):
            with contextlib.suppress(ConfigError):  # in use
                self._runner.unload_adapter(index)
                self._leaving.discard(index)

    @handles_in_thread
    def step(self, message: Step, sent: float) -> StepResult | EarlyReply[StepResult] | Later[StepResult]:
        """Run a step, even if its sender has given up: later steps depend on it."""
        if message.epoch != self._epoch:
            raise StaleStep(
                f"Step {message.batch.number} is of epoch {message.epoch}, but this worker is of {self._epoch}."
            )
        assert self._runner is not None
        assert self._result_thread is not None
        batch, begun = message.batch, time.monotonic()
        (first, last), self._idle_work = self._idle_work, (0.0, 0.0)
        waited = max(0.0, last - max(first, sent))
        if self._faults is not None:
            self._faults.strike_step(batch)
        step = self._runner.start(batch)
        if self._leaving and batch.released:
            self._unload_adapters()
        resident = self._newly_resident() if self._adapters or self._resident else None
        if step.done:
            result = self._finish(step, batch, resident, sent, begun, waited)
            if step.idle_work is None:
                return result
            if message.idle_work_first:
                step.idle_work()
                return result
            return EarlyReply(
                result, partial(self._run_idle_work, step.idle_work) if result.drafted else step.idle_work
            )
        return self._result_thread.submit(self._finish, step, batch, resident, sent, begun, waited)

    def _newly_resident(self) -> tuple[int, ...] | None:
        """The adapters on the device, sorted; None if they are those that were last reported."""
        assert self._runner is not None
        resident = tuple(sorted(self._runner.resident_adapters()))
        if resident == self._resident:
            return None
        self._resident = resident
        return resident

    @handles
    def compile_grammar(self, message: CompileGrammar) -> str | Deferred[str]:
        """Compile in another thread, beside the running step."""
        if self._runner is None or self._epoch is None:
            return ""  # the load was refused
        try:
            compiled = self._runner.compile_grammar(message.grammar)
        except UnsupportedError as error:
            return str(error)
        loop = asyncio.get_running_loop()
        answer: Deferred[str] = loop.create_future()

        def reply(text: str) -> None:
            limit.cancel()
            if not answer.done():
                answer.set_result(text)

        def late() -> None:
            waits = not (compiled.running() or compiled.done())
            too_much = f"it takes more than {message.timeout:g} s to compile; simplify it"
            reply(message.BUSY if waits else too_much)

        def done(found: Future[object]) -> None:
            if not found.cancelled() and not loop.is_closed():  # else the worker ends
                error = found.exception()
                loop.call_soon_threadsafe(reply, "" if error is None else str(error))

        limit = loop.call_later(message.timeout, late)
        compiled.add_done_callback(done)
        return answer

    def _run_idle_work(self, work: Callable[[], None]) -> None:
        begun = time.monotonic()
        work()
        self._idle_work = begun, time.monotonic()

    def _finish(
        self,
        step: RunningStep,
        batch: StepBatch,
        resident: tuple[int, ...] | None,
        sent: float,
        begun: float,
        waited: float,
    ) -> StepResult:
        """Build the result of a step. ``waited``: seconds that it waited for the idle work of the previous step.

        If the step had arrived before the previous result, its time counts from that result: this is how long it delays
        others, including all overhead around the model.
        """
        rank, runner = self._config.worker.rank.tp, self._config.runner
        if runner.pp_rank < runner.pp_size - 1:  # does not wait for what the last stage samples
            result = StepResult(batch.number, accepted=b"", tokens=b"")
        elif rank:  # all ranks sample the same tokens; only rank 0 reports them
            result = StepResult(step.result().number, accepted=b"", tokens=b"")
        else:
            result = step.result()
        now = time.monotonic()
        since, self._answered = max(sent, self._answered), now
        timing = msgspec.structs.replace(result.timing, queued=max(0.0, begun - sent))
        if timing.total:
            timing = msgspec.structs.replace(timing, total=now - since, observe=timing.observe + waited)
        if step.stage_seconds:
            timing = msgspec.structs.replace(timing, stage=step.stage_seconds)
        result = msgspec.structs.replace(result, timing=timing, adapters=resident)
        if not batch.traces:
            return result
        spans = forward_spans(
            batch.traces,
            begun,
            time.monotonic(),
            step=result.number,
            rank=rank,
            queued_seconds=timing.queued,
            prepare_seconds=timing.prepare,
            device_seconds=timing.run,
        )
        if result.drafted:
            spans += _draft_token_spans(spans, result)
        return msgspec.structs.replace(result, spans=spans)


def _draft_token_spans(spans: tuple[WorkerSpan, ...], result: StepResult) -> tuple[WorkerSpan, ...]:
    """The spans of a step's draft tokens."""
    drafted, produced = memoryview(result.drafted).cast("i"), memoryview(result.accepted).cast("i")
    accepted = sum(tokens - 1 for verified, tokens in zip(drafted, produced, strict=True) if verified and tokens)
    return draft_spans(spans, result.timing.draft, result.timing.run, sum(drafted), accepted)


def _is_permanent(error: Exception) -> bool | None:
    """Whether a refusal of the runner would recur at every later start; None if the error is not a refusal."""
    if isinstance(error, CacheSizeError):
        return False
    return True if isinstance(error, ConfigError | LoadError | UnsupportedError) else None
