"""Engine: puts the troupe on stage. The embedding API.

    async with Engine(model="path/of/a/model") as engine:
        async for delta in engine.generate("Once upon a time", SamplingParams(max_tokens=32)):
            print(delta.text, end="")

An engine belongs to the event loop it was started in. It installs no signal handler, changes no environment, touches no
root logger and has no global state: several engines may live in one loop. When it is closed nothing of it remains.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from actors import report
from actors.arguments import ArgumentError, Arguments
from actors.company import Company
from actors.configuration import metric_options
from actors.deaths import Deaths
from actors.early import EarlyWorkers
from actors.faults import FaultPlan
from actors.intake import Intake, Prompt
from actors.journal import Journal
from actors.life import Life
from actors.model_files import model_names
from actors.outcomes import finish, first
from actors.placement import heeded, place
from actors.protocol import Flush
from actors.reporting import Reporting
from actors.requests import Chat, EngineDraining, EngineFailed, SamplingParams
from actors.runtime import ActorStatus, ActorSystem, current_traceparent
from actors.served_model import ServedModel, open_model
from actors.status import EngineStatus, Health
from actors.streams import RequestStream
from actors.traces import check_tracing, start_tracing
from actors.vitals import Vitals
from actors.watchdog import Watchdog
from kernels.step import ModelInfo
from telemetry.actor_spans import ActorSpans
from telemetry.metrics import EngineMetrics
from telemetry.process_metrics import ProcessMetrics
from telemetry.timeline import Outcome, RequestTimeline, Timelines

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from telemetry.tracing import Tracing

__all__ = ["Engine"]

_ASK_TIMEOUT = 30.0


class Engine:
    """A model behind a company of actors.

    Keywords are the command line's long names (``Engine(model="path", max_running_requests=64)``); ``arguments`` takes
    a ready :class:`Arguments` instead. ``registry`` receives the metrics until the engine is closed; without it the
    engine makes its own.
    ``tracer_provider`` receives the traces: the service's own, with its exporter; without it --enable-trace decides.
    ``early``: workers' processes that were started before; the engine ends those it does not need.
    ``faults`` is for tests of what happens when something breaks: see :mod:`actors.faults`.
    Raises :class:`ArgumentError` for wrong keywords.
    """

    def __init__(
        self,
        *,
        arguments: Arguments | None = None,
        registry: CollectorRegistry | None = None,
        tracer_provider: TracerProvider | None = None,
        faults: FaultPlan | None = None,
        early: EarlyWorkers | None = None,
        **keywords: object,
    ) -> None:
        if arguments is None:
            arguments = Arguments.from_keywords(**keywords)
        elif keywords:
            raise ArgumentError([f"{min(keywords)}: give either arguments or keywords, not both"])
        if arguments.model_path is None:
            raise ArgumentError(["model_path: give a model directory or a hub id, as in Engine(model=...)"])
        check_tracing(arguments, tracer_provider)
        self.arguments = arguments
        self.model_names = model_names(arguments)
        self.model_name = self.model_names[0]
        self._owns_registry = registry is None
        self.registry = registry or CollectorRegistry()
        self.metrics = EngineMetrics(
            self.registry, self.model_name, lambda: report.readings(self), metric_options(arguments)
        )
        self.traffic = self.metrics.traffic
        self.processes = ProcessMetrics(lambda: report.processes(self))
        self.tracing: Tracing | None = None  # from start() on, when traces are wanted
        self._tracer_provider = tracer_provider
        self._faults = faults
        self._early = early
        self.timelines = Timelines()
        self._reporting = Reporting(arguments, self.metrics, self.timelines)
        self.vitals = Vitals(self.metrics.steps)
        self.intake: Intake | None = None
        self._model: ServedModel | None = None
        self._company: Company | None = None
        self._system: ActorSystem | None = None
        self.life = Life()
        self._deaths = Deaths(
            arguments.device,
            self.life,
            self.vitals,
            self.traffic,
            model_info=lambda: self.model_info,
            journal=lambda: None if self._company is None else self._company.journal,
        )
        self._run: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- start and end

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def start(self, *, wait: bool = True) -> None:
        """Put up the actors in the running loop and load the model. ``wait=False`` returns at once; see :attr:`status`.

        Raises EngineFailed when it was closed, and, only when it waits, with the reason when it cannot start.
        """
        life = self.life
        life.require_new()
        self._loop = asyncio.get_running_loop()
        self.tracing = start_tracing(self.arguments, self._tracer_provider)
        if self.tracing is not None:
            self.timelines.listen(self.tracing)
        life.begin()
        self._run = asyncio.create_task(self._live(), name="troupe-engine")
        if not wait:
            return
        try:
            await life.settled.wait()
        except BaseException:
            await self.aclose()
            raise
        if life.phase == "failed":
            await self.aclose()
            raise EngineFailed(life.error or "The engine could not start.")
        if life.stop.is_set():
            raise EngineFailed("The engine was closed while it started.")

    async def settled(self, timeout: float) -> None:
        """Return when the start is over, or after ``timeout`` seconds; :attr:`status` says how it went."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self.life.settled.wait()

    async def aclose(self) -> None:
        """End live requests with an error, stop the actors in reverse order, and leave nothing behind. Idempotent."""
        self.life.stop.set()
        self.life.stopped()
        if self._run is not None:
            await finish(self._run)
        elif self._early is not None:
            self._early.close()
        if not self._owns_registry:
            self.metrics.close()

    async def _live(self) -> None:
        """The engine's one task: owner of the actor system from start to end."""
        try:
            observer: object | None = self.traffic if self.metrics.enabled else None
            if self.tracing is not None:
                observer = ActorSpans(self.tracing, observer)
            async with ActorSystem(name="troupe", log_death=self._deaths.tell, observer=observer) as system:
                self._system = system
                self._reporting.start(system)
                system.on_event(self._deaths.on_event)
                soft, hard = self.arguments.stall_seconds, self.arguments.watchdog_timeout
                system.start_task(Watchdog(system, soft=soft, hard=hard).run, "troupe-watchdog")
                try:
                    await self._serve(system)
                except Exception as error:
                    self.life.failed(error)
                finally:
                    # Before the actors stop, which takes a while: nobody is to wait for an answer from them.
                    self._end_requests()
        except (Exception, BaseExceptionGroup) as error:
            self.life.failed(error)
        finally:
            self._end_requests()
            if self._early is not None:
                self._early.close()
            self._reporting.stop()
            if self.tracing is not None:
                await self.tracing.close()
            self._system = None
            self.life.settled.set()

    async def _serve(self, system: ActorSystem) -> None:
        """Set up and live, until the engine is closed. Raises what ends it otherwise."""
        stop, broken = self.life.stop, self.life.broken
        if not stop.is_set():
            await first(stop.wait(), broken.wait(), self._set_up(system))
        await first(stop.wait(), broken.wait())
        if not stop.is_set():
            raise EngineFailed(self.life.error)

    def _end_requests(self) -> None:
        self.life.stopped()
        if self.intake is not None:
            self.intake.fail_all(EngineFailed(self.life.error or "The engine was stopped."))

    async def _set_up(self, system: ActorSystem) -> None:
        self.life.progress("model files", 0.0)
        arguments = heeded(self.arguments, place(self.arguments, os.environ))
        model = await open_model(arguments)
        self._model = model
        if model.speculation is not None:
            self.metrics.steps.speculation.algorithm = model.speculation.algorithm
        company = Company(
            system,
            arguments,
            model,
            journal=Journal(),
            vitals=self.vitals,
            on_progress=self.life.progress,
            on_ready=self._on_ready,
            on_refused=lambda reason, permanent: self.life.give_up(reason, permanent=permanent),
            tracing=self.tracing,
            faults=self._faults,
            early=self._early,
        )
        self._company = company
        self.intake = Intake(self.arguments, model, company, self.timelines)
        await company.assemble()

    def _on_ready(self, info: ModelInfo) -> None:
        assert self._model is not None
        self._model.loaded(info)
        self.life.ready()

    # -- requests

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
        tenant: str = "",
        timeline: RequestTimeline | None = None,
    ) -> RequestStream:
        """Generate from a text, token ids or a conversation; an asynchronous iterator of deltas.

        Everything that can be refused without waiting is refused here: raises InvalidRequest, QueueFull,
        EngineNotReady, EngineDraining, EngineFailed. What needs the tokenizer is refused by ``await stream.ready()`` or
        the first delta. ``request_id`` is the caller's label for logs and :meth:`abort`; ``timeout`` is seconds for the
        whole request; ``cache_salt`` keeps its cached prefixes apart from those of other salts. ``tenant`` is whose it
        is: tenants get equal shares of the engine. ``timeline`` is what the caller has opened for this request in
        :attr:`timelines`; it ends with the request, also with a refused one.
        """
        self._check_loop()
        if timeline is None:
            timeline = self.timelines.open(
                f"req-{secrets.token_hex(12)}",
                operation="chat" if isinstance(prompt, Chat) else "text_completion",
                model=self.model_name,
                label=request_id,
                tenant=tenant,
                traceparent=current_traceparent.get(),
            )
        try:
            self.life.require_admitting()
            return self._require_intake().open(
                prompt,
                params or SamplingParams(),
                timeline=timeline,
                label=request_id,
                priority=priority,
                timeout=timeout,
                cache_salt=cache_salt,
                tenant=tenant,
            )
        except Exception as error:
            timeline.mark("rejected", time.monotonic())
            self.timelines.close(timeline, Outcome(error_type=type(error).__name__, message=str(error)))
            raise

    def _require_intake(self) -> Intake:
        self.life.require_running()
        self._check_loop()
        if self.intake is None or self.model_info is None:
            raise self.life.not_ready()
        return self.intake

    def _check_loop(self) -> None:
        if self._loop is not None and asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("This engine lives in another event loop. Call it from the loop it was started in.")

    async def abort(self, request_id: str | None = None, *, all: bool = False, tenant: str | None = None) -> int:
        """Abort the requests of this id (the engine's, or the callers' label, both exactly), or all; how many.

        With a ``tenant`` only those of that one.
        """
        return 0 if self.intake is None else self.intake.abort(request_id, all_=all, tenant=tenant)

    # -- text

    async def tokenize(self, prompt: str | Chat, *, add_special_tokens: bool = True, tenant: str = "") -> list[int]:
        """Token ids of a text or a conversation."""
        return await self._require_intake().encoding.encode(
            prompt, add_special_tokens=add_special_tokens, tenant=tenant
        )

    async def render(self, chat: Chat) -> str:
        """A conversation as the text that the model gets."""
        return await self._require_intake().encoding.render(chat)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return await self._require_intake().encoding.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Each token's own text; U+FFFD for a token that is part of a character."""
        return await self._require_intake().encoding.token_strings(token_ids)

    # -- operation

    @property
    def status(self) -> EngineStatus:
        return self.life.status

    @property
    def start_seconds(self) -> float | None:
        """Seconds from :meth:`start` until it was ready; None before."""
        return self.life.start_seconds

    @property
    def model_info(self) -> ModelInfo | None:
        """What the worker said of the loaded model; None before."""
        return self._model.info if self._model is not None else None

    @property
    def context_length(self) -> int:
        """Tokens a sequence may have; 0 before the model's files are read."""
        return self._model.context_length if self._model is not None else 0

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size if self._model is not None else 0

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template; False before the model's files are read."""
        codec = None if self._model is None else self._model.codec
        return codec is not None and codec.template is not None

    @property
    def generation_defaults(self) -> dict[str, Any]:
        """What a request's sampling parameters are when it leaves them out: the model's and the server's."""
        return self._model.generation_defaults if self._model is not None else {}

    def begin_drain(self) -> None:
        """Refuse new requests from now on; live ones go on."""
        self.life.drain()

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait until the live ones end; at the deadline (seconds) the rest end with an error.

        True when all ended by themselves.
        """
        self.begin_drain()
        if self.intake is None:
            return True
        try:
            async with asyncio.timeout(timeout):
                if self._company is not None and self._company.faults is not None:
                    await self._company.faults.strike_async("drain")
                await self.intake.idle.wait()
        except TimeoutError:
            self.intake.fail_all(EngineDraining("The server is shutting down; the answer is not complete."))
            return False
        return True

    async def flush_cache(self) -> bool:
        """Empty the prefix cache; False, and nothing is done, while requests run or wait."""
        self._require_intake()
        assert self._company is not None
        return await self._company.scheduler.ask(Flush(), timeout=_ASK_TIMEOUT)

    def actors(self) -> list[ActorStatus]:
        """What each actor is doing now."""
        return self._system.describe() if self._system is not None else []

    def health(self) -> Health:
        """Whether work makes progress."""
        return report.health(self)

    def describe(self) -> dict[str, Any]:
        """Everything an operator may want to know, without secrets: for /server_info."""
        return report.describe(self)
