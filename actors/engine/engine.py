"""Engine: serves a model in this event loop. The API for embedding in Python programs.

    async with Engine(model="path/of/a/model") as engine:
        async for delta in engine.generate("Once upon a time", SamplingParams(max_tokens=32)):
            print(delta.text, end="")

An engine belongs to the event loop it was started in. It installs no signal handler, does not change the environment or
the root logger, and has no global state: several engines may run in one loop. After it is closed no task, thread,
process or file descriptor is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Sequence
from importlib.util import find_spec
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from prometheus_client import CollectorRegistry

from actors.boards.expert_recorder import ExpertRecorder, write_record
from actors.boards.health_board import HealthBoard, HealthBoards
from actors.engine import report
from actors.engine.actor_tree import ActorTree
from actors.engine.configuration import load_balance_method, metric_options
from actors.engine.crash_log import CrashLog
from actors.engine.lifecycle import Lifecycle
from actors.engine.nodes import with_nodes, worker_launcher
from actors.engine.opening import open_model
from actors.engine.replica import ReplicaSetup
from actors.engine.reporting import Reporting
from actors.engine.status import EngineStatus, Health, ReplicaLoad
from actors.engine.traces import check_tracing, start_tracing
from actors.faults import FaultInjector, FaultPlan
from actors.options import ArgumentError, Arguments
from actors.protocol import Continue, Flush, Pause, SchedulerProtocol, WorkerProtocol
from actors.protocol.requests import Chat, EngineDraining, EngineFailed, InvalidRequest, SamplingParams
from actors.requests.adapters import Adapters
from actors.requests.intake import GENERATE, Intake
from actors.requests.outcomes import finish, first
from actors.requests.request_rules import Prompt, RequestOptions
from actors.requests.router import Router
from actors.requests.streams import RequestStream
from actors.runtime import ActorRef, ActorStatus, ActorSystem, MailboxFull, current_traceparent
from actors.text.encoding import Encoding
from actors.text.model_files import model_names
from actors.text.served_model import ServedModel
from actors.workers.early_workers import EarlyWorkers
from actors.workers.launchers.launcher import WorkerLauncher
from actors.workers.nodes.hub import Hub
from actors.workers.placement import heeded, place
from actors.workers.watchdog import Watchdog
from kernels.contract.info import ModelInfo
from kernels.contract.tasks import Classify, Embed, Number, Score, Task, TaskResult, Vector
from kernels.contract.topology import WorkerId
from telemetry.metrics.engine import EngineMetrics
from telemetry.metrics.process import ProcessMetrics
from telemetry.timeline import Outcome, RequestTimeline, Timelines
from telemetry.traces.actor_spans import ActorSpans

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from telemetry.traces.tracing import Tracing

__all__ = ["Engine"]

_ASK_TIMEOUT_SECONDS = 30.0


def _operation(prompt: Prompt, task: Task) -> str:
    """The name of an operation in timelines and traces, by OpenTelemetry's conventions."""
    if isinstance(task, Embed):
        return "embeddings"
    return "chat" if isinstance(prompt, Chat) else "text_completion"


def _check_types(prompt: object, params: object) -> None:
    """Raise TypeError for a prompt or parameters of another type, as far as the first token id shows it."""
    if not isinstance(prompt, str | Chat):
        first: object = 0
        if isinstance(prompt, Sequence) and len(prompt):
            first = prompt[0]
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes) or not isinstance(first, Integral):
            kind = type(prompt).__name__
            kind += "" if isinstance(first, Integral) else f" of {type(first).__name__}"
            raise TypeError(f"prompt must be text, token ids or Chat(messages=[...]), not {kind}")
    if not (params is None or isinstance(params, SamplingParams)):
        raise TypeError(f"params must be SamplingParams(...), not {type(params).__name__}")


class Engine:
    """Serves a model with actors.

    Keywords are the command line's long names (``Engine(model="path", max_running_requests=64)``), except those that
    only a server reads, such as ``port``. ``arguments`` takes an :class:`Arguments` instead, with the options of the
    server that the engine is for, if there is one. ``registry`` receives the metrics until the engine is closed; by
    default the engine creates one. ``tracer_provider`` receives the traces and has its own exporter; without it
    they follow --enable-trace. ``early``: worker processes started before; the engine ends those it does not need.
    ``faults``: faults to inject in tests, see :mod:`actors.faults`. Raises :class:`ArgumentError` for wrong keywords.
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
            arguments = Arguments.for_engine(**keywords)
        elif keywords:
            raise ArgumentError([f"{min(keywords)}: give either arguments or keywords, not both"])
        if arguments.model_path is None:
            raise ArgumentError(["model_path: give a model directory or a hub id, as in Engine(model=...)"])
        check_tracing(arguments, tracer_provider)
        arguments = with_nodes(arguments)
        if arguments.grammar_backend == "xgrammar" and find_spec("xgrammar") is None:
            raise ArgumentError(["--grammar-backend xgrammar needs its package: pip install 'troupe-llm[xgrammar]'"])
        self.arguments = arguments
        self.model_names = model_names(arguments)
        self.model_name = self.model_names[0]
        self._owns_registry = registry is None
        self.registry = registry or CollectorRegistry()
        self.metrics = EngineMetrics(
            self.registry, self.model_name, lambda: report.readings(self), metric_options(arguments)
        )
        self.actor_messages = self.metrics.actor_messages
        self.processes = ProcessMetrics(lambda: report.processes(self))
        self.tracing: Tracing | None = None  # from start() on, if traces are enabled
        self._tracer_provider = tracer_provider
        self._faults = faults
        self._early = early
        self._injector: FaultInjector | None = None
        self.timelines = Timelines()
        self._reporting = Reporting(arguments, self.metrics, self.timelines)
        self.board = HealthBoards(
            [HealthBoard(self.metrics.steps, number) for number in range(arguments.data_parallel_size)]
        )
        self.expert_recorder = ExpertRecorder(
            arguments.expert_distribution_recorder_mode, arguments.expert_distribution_recorder_buffer_size
        )
        self.adapters = Adapters(arguments, self._workers)
        self.intake: Intake | None = None
        self._model: ServedModel | None = None
        self._actor_tree: ActorTree | None = None
        self._system: ActorSystem | None = None
        self.hub: Hub | None = None  # while it runs, if it has several nodes
        self.lifecycle = Lifecycle()
        self._crash_log = CrashLog(
            arguments.device,
            self.lifecycle,
            self.actor_messages,
            model_info=lambda: self.model_info,
            find=lambda actor: None if self._actor_tree is None else self._actor_tree.find(actor),
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
        """Start the actors in the running loop and load the model. ``wait=False`` returns at once; see :attr:`status`.

        Raises EngineFailed if it was closed or, with ``wait``, with the reason if it cannot start.
        """
        lifecycle = self.lifecycle
        lifecycle.require_new()
        self._loop = asyncio.get_running_loop()
        self.tracing = start_tracing(self.arguments, self._tracer_provider)
        if self.tracing is not None:
            self.timelines.listen(self.tracing)
        lifecycle.begin()
        self._run = asyncio.create_task(self._run_actors(), name="troupe-engine")
        if not wait:
            return
        try:
            await lifecycle.start_over.wait()
        except BaseException:
            await self.aclose()
            raise
        if lifecycle.phase == "failed":
            await self.aclose()
            raise EngineFailed(lifecycle.error or "The engine could not start.")
        if lifecycle.stop.is_set():
            raise EngineFailed("The engine was closed while it started.")

    async def wait_for_start(self, timeout: float) -> None:
        """Wait until the engine is ready or has failed, at most ``timeout`` seconds; see :attr:`status`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self.lifecycle.start_over.wait()

    async def aclose(self) -> None:
        """End live requests with an error and stop the actors in reverse order. Idempotent."""
        self.lifecycle.stop.set()
        self.lifecycle.stopped()
        if self._run is not None:
            await finish(self._run)
        elif self._early is not None:
            self._early.close()
        if not self._owns_registry:
            self.metrics.close()

    async def _run_actors(self) -> None:
        """The engine's one task, which owns the actor system from start to end."""
        try:
            observer: object | None = self.actor_messages if self.metrics.enabled else None
            if self.tracing is not None:
                observer = ActorSpans(self.tracing, observer)
            async with (
                worker_launcher(self.arguments, self._early, self.lifecycle) as launcher,
                ActorSystem(name="troupe", log_death=self._crash_log.log, observer=observer) as system,
            ):
                self.hub = launcher if isinstance(launcher, Hub) else None
                self._system = system
                self._reporting.start(system)
                system.on_event(self._crash_log.on_event)
                soft, hard = self.arguments.stall_seconds, self.arguments.watchdog_timeout
                system.start_task(Watchdog(system, soft=soft, hard=hard).run, "troupe-watchdog")
                try:
                    await self._serve(system, launcher)
                except Exception as error:
                    self.lifecycle.failed(error)
                finally:
                    # Before the actors stop, which takes a while: clients should not wait for that.
                    self._end_requests()
        except (Exception, BaseExceptionGroup) as error:
            self.lifecycle.failed(error)
        finally:
            self._end_requests()
            if self._early is not None:
                self._early.close()
            self._reporting.stop()
            if self.tracing is not None:
                await self.tracing.close()
            self._system = self.hub = None
            self.lifecycle.start_over.set()

    async def _serve(self, system: ActorSystem, launcher: WorkerLauncher) -> None:
        """Set up and run until the engine is closed. Raises the error that ends it otherwise."""
        stop, broken = self.lifecycle.stop, self.lifecycle.broken
        if not stop.is_set():
            await first(stop.wait(), broken.wait(), self._set_up(system, launcher))
        await first(stop.wait(), broken.wait())
        if not stop.is_set():
            raise EngineFailed(self.lifecycle.error)

    def _end_requests(self) -> None:
        self.adapters.close()
        self.lifecycle.stopped()
        if self.intake is not None:
            self.intake.fail_all(EngineFailed(self.lifecycle.error or "The engine was stopped."))

    async def _set_up(self, system: ActorSystem, launcher: WorkerLauncher) -> None:
        self.lifecycle.progress("model files", 0.0)
        placement = place(self.arguments, os.environ)
        arguments = heeded(self.arguments, placement)
        opened = await open_model(arguments)
        self._model = opened.served
        if self.hub is not None:
            self.hub.compare(await asyncio.to_thread(opened.fingerprint, arguments))
        self.adapters.begin(opened.adapters, opened.adapter_settings, opened.served.files.config)
        if opened.speculation is not None:
            self.metrics.steps.speculation.algorithm = opened.speculation.algorithm
        if self._faults is not None:
            self._injector = FaultInjector(self._faults.path, lambda: report.worker_process(self))
        self._actor_tree = actor_tree = ActorTree(
            ReplicaSetup(
                system,
                arguments,
                opened,
                placement,
                opened.served.context_length,
                launcher,
                tracing=self.tracing,
                faults=self._injector,
                fault_plan="" if self._faults is None else self._faults.path,
                recorder=self.expert_recorder if self.expert_recorder.mode is not None else None,
                adapters=self.adapters.numbered,
                adapters_lost=self.adapters.lose,
            ),
            self.board.all,
            on_progress=self.lifecycle.progress,
            on_ready=self._on_ready,
            on_refused=lambda reason, permanent: self.lifecycle.give_up(reason, permanent=permanent),
            hand_over=lambda route: () if self.intake is None else self.intake.hand_over(route),
        )
        await actor_tree.assemble()
        encoding = Encoding(
            self.arguments, opened.served, tokenizers=actor_tree.tokenizers, rendering=actor_tree.rendering
        )
        self.intake = Intake(
            self.arguments,
            opened.served,
            encoding=encoding,
            router=Router(
                [replica.route for replica in actor_tree.replicas],
                load_balance_method(self.arguments),
                self.arguments.max_running_requests,
            ),
            timelines=self.timelines,
            adapters=self.adapters,
            faults=self._injector,
        )

    def _on_ready(self, info: ModelInfo) -> None:
        assert self._model is not None
        self._model.loaded(info)
        self.lifecycle.ready()

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
        task: Task = GENERATE,
        truncate: int | None = None,
        adapter: str | None = None,
        replica: int | None = None,
    ) -> RequestStream:
        """Generate from a text, token ids or a conversation; returns an asynchronous iterator of deltas.

        Raises TypeError for another prompt or ``params``, and InvalidRequest, QueueFull, EngineNotReady, EngineDraining
        or EngineFailed for checks that need no waiting. Errors that need the tokenizer come from ``await
        stream.ready()`` or the first delta. ``request_id``: the caller's label for logs and :meth:`abort`. ``timeout``:
        seconds for the whole request. ``cache_salt``: requests share cached prefixes only with the same salt.
        ``tenant``: the client's name; tenants get equal shares of the engine. ``timeline``: a timeline that the caller
        has opened in :attr:`timelines`; it ends with the request, also with a refused one. ``task``: the task; the
        result of one that does not generate is in the last delta. :meth:`embed` and :meth:`score` are simpler to use.
        ``truncate``: the tokens that are kept of an input that is embedded or classified, -1 for as many as the model
        takes; None: too many are an error. ``replica``: of --data-parallel-size, the one that runs it; None: by
        --load-balance-method. ``adapter``: the name of the LoRA adapter to run with.
        """
        self._check_loop()
        _check_types(prompt, params)
        if timeline is None:
            timeline = self.timelines.open(
                f"req-{secrets.token_hex(12)}",
                operation=_operation(prompt, task),
                model=self.model_name,
                label=request_id,
                tenant=tenant,
                traceparent=current_traceparent.get(),
            )
        try:
            self.lifecycle.require_admitting()
            return self._require_intake().open(
                prompt,
                params or SamplingParams(),
                timeline=timeline,
                options=RequestOptions(
                    label=request_id,
                    priority=priority,
                    timeout=timeout,
                    cache_salt=cache_salt,
                    tenant=tenant,
                    truncate=truncate,
                    adapter=adapter,
                    replica=replica,
                ),
                task=task,
            )
        except Exception as error:
            timeline.mark("rejected", time.monotonic())
            self.timelines.close(timeline, Outcome(error_type=type(error).__name__, message=str(error)))
            raise

    async def embed(
        self, prompt: Prompt, *, normalize: bool = True, prompt_name: str | None = None, **options: Any
    ) -> tuple[float, ...]:
        """The embedding of a text: the model's final hidden state at its last token, or as its pooling says.

        ``prompt_name``: of the model's prompts, the one that stands before a text; None: its default one.

        ``options``: those of :meth:`generate` except ``params``. Raises as :meth:`generate`, and InvalidRequest if the
        model's runner returns no hidden states.
        """
        result = await self._result(prompt, Embed(normalize, prompt_name), options)
        assert isinstance(result, Vector)
        return tuple(memoryview(result.values).cast("f"))

    async def score(self, prompt: str | Sequence[int], continuation: str | Sequence[int], **options: Any) -> float:
        """The natural log-probability of ``continuation`` after ``prompt``: the sum over its tokens.

        A text is encoded by itself, the prompt with the model's special tokens and the continuation without. Neither
        may be empty. ``options`` and errors: as :meth:`embed`.
        """
        encoding = self._require_intake().encoding
        first = await encoding.encode(prompt) if isinstance(prompt, str) else list(prompt)
        rest = (
            await encoding.encode(continuation, add_special_tokens=False)
            if isinstance(continuation, str)
            else list(continuation)
        )
        if not first or not rest:
            field = "continuation" if first else "prompt"
            raise InvalidRequest(f"{field} is empty. Send at least one token.", param=field)
        result = await self._result([*first, *rest], Score(start=len(first)), options)
        assert isinstance(result, Number)
        return result.value

    async def classify(self, prompt: Prompt, **options: Any) -> tuple[float, ...]:
        """The probability of each class of the model's classification head. ``options`` and errors: as :meth:`embed`;
        raises InvalidRequest for a model without such a head."""
        result = await self._result(prompt, Classify(), options)
        assert isinstance(result, Vector)
        return tuple(memoryview(result.values).cast("f"))

    async def tokenize_pair(self, first: str, second: str, truncate: int | None = None) -> tuple[list[int], int]:
        """Token ids of two texts, joined by the model's tokenizer, and the index of the second text's first token
        (0 for a model without token types), for ``Classify``. ``truncate``: as :meth:`generate`. Raises
        InvalidRequest."""
        return await self._require_intake().encoding.encode_pair(first, second, truncate)

    async def _result(self, prompt: Prompt, task: Task, options: dict[str, Any]) -> TaskResult:
        result: TaskResult | None = None
        async with self.generate(prompt, task=task, **options) as stream:
            async for delta in stream:
                result = delta.result or result
        assert result is not None
        return result

    def _require_intake(self) -> Intake:
        self.lifecycle.require_running()
        self._check_loop()
        if self.intake is None or self.model_info is None:
            raise self.lifecycle.not_ready()
        return self.intake

    def _check_loop(self) -> None:
        if self._loop is not None and asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("This engine runs in another event loop. Call it from the loop it was started in.")

    async def abort(self, request_id: str | None = None, *, all: bool = False, tenant: str | None = None) -> int:
        """Abort the requests with this id (the engine's id or the caller's label, exact match), or all; returns how
        many.

        With a ``tenant`` only requests of that tenant.
        """
        return 0 if self.intake is None else self.intake.abort(request_id, all_=all, tenant=tenant)

    # -- text

    async def tokenize(self, prompt: str | Chat, *, add_special_tokens: bool = True, tenant: str = "") -> list[int]:
        """Token ids of a text or a conversation."""
        return await self._require_intake().encoding.encode(
            prompt, add_special_tokens=add_special_tokens, tenant=tenant
        )

    async def render(self, chat: Chat) -> str:
        """Render a conversation to the text of the prompt."""
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
        return self.lifecycle.status

    @property
    def start_seconds(self) -> float | None:
        """Seconds from :meth:`start` until it was ready; None before."""
        return self.lifecycle.start_seconds

    @property
    def model_info(self) -> ModelInfo | None:
        """The description of the loaded model; None before it is loaded."""
        return self._model.info if self._model is not None else None

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence; 0 before the model's files are read."""
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
    def chat_template(self) -> str | None:
        """The source of the model's chat template; None without one and before the model's files are read."""
        codec = None if self._model is None else self._model.codec
        return None if codec is None else codec.template

    @property
    def architecture(self) -> str:
        """The first of config.json's ``architectures``; empty before the model's files are read."""
        return self._model.files.architecture if self._model is not None else ""

    @property
    def generation_defaults(self) -> dict[str, Any]:
        """Default sampling parameters of requests: the model's and the server's."""
        return self._model.generation_defaults if self._model is not None else {}

    def begin_drain(self) -> None:
        """Refuse new requests from now on; live ones continue."""
        self.lifecycle.drain()

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait until the live ones end; after ``timeout`` seconds the rest end with an error.

        Returns whether all ended by themselves.
        """
        self.begin_drain()
        if self.intake is None:
            return True
        for scheduler in self._schedulers():  # in a pause no request would end
            with contextlib.suppress(MailboxFull):
                scheduler.offer(Continue())
        try:
            async with asyncio.timeout(timeout):
                if self._injector is not None:
                    await self._injector.strike_async("drain")
                await self.intake.idle.wait()
        except TimeoutError:
            self.intake.fail_all(EngineDraining("The server is shutting down; the answer is not complete."))
            return False
        return True

    async def flush_cache(self) -> bool:
        """Empty the prefix caches; returns False if one was not emptied because requests run or wait.

        In a pause with ``retract`` requests may wait.
        """
        self._require_intake()
        return all([await each.ask(Flush(), timeout=_ASK_TIMEOUT_SECONDS) for each in self._schedulers()])

    async def pause_generation(self, mode: Literal["abort", "in_place", "retract"] = "abort") -> None:
        """Run no more steps until :meth:`continue_generation`; returns when none is in flight.

        Requests may come meanwhile and wait. ``abort`` ends the live ones. With ``in_place`` they keep their places in
        the cache; with ``retract`` they return to the queue and are computed again, so that :meth:`flush_cache` is
        possible.
        """
        self._require_intake()
        pause = Pause(retract=mode == "retract")
        await asyncio.gather(*(each.ask(pause, timeout=_ASK_TIMEOUT_SECONDS) for each in self._schedulers()))
        if mode == "abort":
            await self.abort(all=True)

    async def continue_generation(self) -> None:
        """End a pause; without one nothing happens."""
        self._require_intake()
        await asyncio.gather(*(each.ask(Continue(), timeout=_ASK_TIMEOUT_SECONDS) for each in self._schedulers()))

    async def load_adapter(self, name: str, path: str, *, pinned: bool | None = None, replace: bool = False) -> None:
        """Load a LoRA adapter from a local directory, beside running requests. ``replace``: instead of the one of this
        name. ``pinned``: never unload it to make room; None: as the one that it replaces. Raises InvalidRequest."""
        self._require_intake()
        await self.adapters.load(name, path, pinned=pinned, replace=replace)

    async def unload_adapter(self, name: str) -> None:
        """Take no more requests of an adapter, and return when those that run have ended. Raises InvalidRequest."""
        self._require_intake()
        await self.adapters.unload(name)

    async def dump_expert_distribution(self) -> Path:
        """Write what :attr:`expert_recorder` has recorded to a new JSON file and begin a new record. Returns the file's
        path. Raises OSError if it cannot be written; then the record goes on."""
        about = {"model": self.model_name}
        record, folder = self.expert_recorder.take(), self.arguments.expert_distribution_recorder_dir
        try:
            return await asyncio.to_thread(write_record, record, folder, about)
        except OSError:
            self.expert_recorder.restore(record)
            raise

    def _workers(self) -> list[ActorRef[WorkerProtocol]]:
        return (
            []
            if self._actor_tree is None
            else [each for replica in self._actor_tree.replicas for each in replica.workers]
        )

    def _schedulers(self) -> list[ActorRef[SchedulerProtocol]]:
        return [] if self._actor_tree is None else [replica.scheduler for replica in self._actor_tree.replicas]

    @property
    def worker_ids(self) -> dict[str, WorkerId]:
        """The workers by their names in :meth:`actors` and the metrics; empty before the start."""
        replicas = [] if self._actor_tree is None else self._actor_tree.replicas
        return {worker.name: worker for replica in replicas for worker in replica.worker_ids}

    def actors(self) -> list[ActorStatus]:
        """The current state of each actor."""
        return self._system.describe() if self._system is not None else []

    def health(self) -> Health:
        """Whether work makes progress."""
        return report.health(self)

    def loads(self) -> list[ReplicaLoad]:
        """The load of each replica."""
        return report.loads(self)

    def describe(self) -> dict[str, Any]:
        """State, load and arguments for operators, without secrets: for /server_info."""
        return report.describe(self)
