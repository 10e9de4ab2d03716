"""A fake engine with the engine's contract and scripted answers, and servers for its application."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any

import hypercorn.asyncio
import hypercorn.config
from prometheus_client import CollectorRegistry

from actors.boards.expert_recorder import ExpertRecorder
from actors.boards.health_board import HealthBoard
from actors.engine.status import EngineStatus, Health, ReplicaLoad
from actors.options import Arguments
from actors.protocol.requests import (
    Acceptance,
    Chat,
    Delta,
    EngineDraining,
    EngineNotReady,
    InvalidRequest,
    RequestAborted,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from actors.requests.adapters import Adapters
from actors.requests.sampling_rules import validate
from actors.runtime import ActorStatus, current_traceparent
from app.application import Troupe
from kernels.contract.tasks import Embed, Generate, Task, Vector
from telemetry.metrics.actor_messages import ActorMessages
from telemetry.metrics.engine import EngineMetrics
from telemetry.timeline import Outcome, RequestTimeline, Timelines
from tests.kits import waiting

__all__ = [
    "ANSWER",
    "FakeEngine",
    "FakeStream",
    "Server",
    "scored",
]

ANSWER = ["Paris", " is", " the", " capital", " of", " France."]


class FakeStream:
    """One request of the fake engine: each choice returns ``engine.answer``, one piece a step."""

    def __init__(self, engine: FakeEngine, request_id: str, prompt: Any, params: SamplingParams, label: str | None):
        self.engine = engine
        self.request_id = request_id
        self.label = label
        self.params = params
        self.prompt = prompt
        self.prompt_tokens = 0
        self.prompt_end: tuple[int, ...] = ()
        self.timeline: RequestTimeline | None = None
        self.tenant = ""
        self.task: Task = Generate()
        self.aborted = asyncio.Event()
        self.over = asyncio.Event()
        self.ended = False
        self.closed = False
        self.at_gate = False
        self._deltas = self._run()

    async def ready(self) -> None:
        if self.engine.tokenizing is not None:
            await self.engine.tokenizing.wait()
        if self.engine.ready_error is not None:
            raise self.engine.ready_error
        if self.prompt == "":
            raise InvalidRequest("prompt: must not be empty.", param="prompt")
        ids = self.prompt if isinstance(self.prompt, list) else await self.engine.tokenize(self.prompt)
        self.prompt_tokens, self.prompt_end = len(ids), tuple(ids[-16:])

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Delta:
        return await self._deltas.__anext__()

    async def _pause(self, step: int) -> None:
        waits = [self.aborted.wait()]
        if self.engine.gate is not None and step >= self.engine.gate_at:
            self.at_gate = True
            waits.append(self.engine.gate.wait())
            tasks = [asyncio.ensure_future(wait) for wait in waits]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
        else:
            waits[0].close()
            await asyncio.sleep(self.engine.step_seconds)
        if self.aborted.is_set():
            raise RequestAborted("aborted")

    async def _run(self) -> AsyncIterator[Delta]:
        await self.ready()
        params = self.params
        ids = self.prompt if isinstance(self.prompt, list) else await self.engine.tokenize(self.prompt)
        if isinstance(self.task, Embed):
            vector = array("f", [0.6, 0.0, 0.8]).tobytes()
            usage = Usage(prompt_tokens=len(ids))
            self.ended = True
            yield Delta(request_id=self.request_id, finish_reason="stop", usage=usage, result=Vector(vector))
            return
        pieces = self.engine.answer[: params.max_tokens or params.default_max_tokens]
        for step, piece in enumerate(pieces):
            await self._pause(step)
            if self.engine.fail_at == step:
                raise self.engine.stream_error
            for index in range(params.n):
                last = step == len(pieces) - 1
                reason = None if not last else "stop" if len(pieces) == len(self.engine.answer) else "length"
                yield Delta(
                    request_id=self.request_id,
                    index=index,
                    text=piece,
                    token_ids=(1000 + step,),
                    logprobs=(scored(1000 + step, piece, -0.5, params.logprobs),)
                    if params.logprobs is not None
                    else None,
                    prompt_logprobs=tuple(
                        scored(token, chr(token), None if position == 0 else -1.0, params.prompt_logprobs)
                        for position, token in enumerate(ids)
                    )
                    if params.prompt_logprobs is not None and step == 0
                    else None,
                    prompt_token_ids=tuple(ids) if step == 0 else None,
                    finish_reason=reason,
                    matched_stop=self.engine.matched_stop if last else None,
                    usage=Usage(
                        prompt_tokens=len(ids),
                        completion_tokens=step + 1,
                        cached_tokens=len(ids) // 2,
                        acceptance=self.engine.acceptance,
                    ),
                )
        self.ended = True

    async def aclose(self) -> None:
        self.closed = True
        self.over.set()
        if self.timeline is not None:
            self.engine.timelines.close(self.timeline, Outcome(error_type="" if self.ended else "abort"))
        if not self.ended:
            self.aborted.set()
        self.engine.open.discard(self)


def scored(token: int, text: str, logprob: float | None, top: int | None) -> TokenLogprob:
    others = () if not top or logprob is None else (TokenLogprob(token, text, text.encode(), logprob),)
    return TokenLogprob(token, text, text.encode(), logprob, others)


class FakeEngine:
    """The contract of actors.engine.Engine. Text is encoded a character a token."""

    def __init__(self, arguments: Arguments | None = None) -> None:
        self.arguments = arguments or Arguments(
            model_path="/models/fake", served_model_name=("fake",), skip_server_warmup=True
        )
        self.model_names = self.arguments.model_names
        self.model_name = self.model_names[0]
        self.model_info = None
        self.context_length = 4096
        self.vocab_size = 0x110000
        self.chats = True
        self.chat_template: str | None = None
        self.architecture = "FakeForCausalLM"
        self.generation_defaults: dict[str, Any] = {}
        self.registry = CollectorRegistry()
        self.timelines = Timelines()
        self.actor_messages = ActorMessages()
        self.board = HealthBoard()
        self.expert_recorder = ExpertRecorder(self.arguments.expert_distribution_recorder_mode, None)
        self.adapters = Adapters(self.arguments, list)
        self.intake = None
        self.company: list[ActorStatus] = []
        self.tracing = None
        self.metrics = EngineMetrics(self.registry, self.model_name, dict)
        self.status = EngineStatus(phase="ready", progress=1.0, stage="ready")
        self.start_error: str | None = None
        self.permanent = False
        self.answer = list(ANSWER)
        self.acceptance: Acceptance | None = None
        self.matched_stop: str | int | None = None
        self.step_seconds = 0.0
        self.gate: asyncio.Event | None = None
        self.gate_at = 0
        self.tokenizing: asyncio.Event | None = None
        self.fail_at: int | None = None
        self.stream_error: Exception = RuntimeError("boom")
        self.ready_error: Exception | None = None
        self.admission_error: Exception | None = None
        self.healthy = True
        self.requests: list[dict[str, Any]] = []
        self.streams: list[FakeStream] = []
        self.open: set[FakeStream] = set()
        self.flushed = 0
        self.paused = ""
        self.closed = False

    async def wait_for_start(self, timeout: float) -> None:
        await asyncio.sleep(min(timeout, 0.01))

    async def start(self, *, wait: bool = True) -> None:
        if self.start_error is not None:
            self.status = EngineStatus(
                phase="failed", progress=0.1, stage="weights", error=self.start_error, permanent=self.permanent
            )

    async def aclose(self) -> None:
        self.closed = True
        for stream in list(self.open):
            await stream.aclose()

    def generate(self, prompt: Any, params: SamplingParams | None = None, **keywords: Any) -> FakeStream:
        if self.admission_error is not None:
            raise self.admission_error
        if self.status.phase == "starting":
            raise EngineNotReady("starting")
        if self.status.phase == "draining":
            raise EngineDraining("draining")
        params = params or SamplingParams()
        validate(params)
        if isinstance(prompt, list):
            self.check_ids(prompt)
        trace = current_traceparent.get()
        timeline = keywords.pop("timeline", None)
        task = keywords.pop("task", Generate())
        self.requests.append({"prompt": prompt, "params": params, "traceparent": trace, **keywords})
        stream = FakeStream(self, f"req-{len(self.streams)}", prompt, params, keywords.get("request_id"))
        stream.timeline = timeline
        stream.tenant = keywords.get("tenant", "")
        stream.task = task
        self.streams.append(stream)
        self.open.add(stream)
        return stream

    async def load_adapter(self, name: str, path: str, *, pinned: bool | None = None, replace: bool = False) -> None:
        await self.adapters.load(name, path, pinned=pinned, replace=replace)

    async def unload_adapter(self, name: str) -> None:
        await self.adapters.unload(name)

    def check_ids(self, ids: Sequence[int]) -> None:
        if any(not 0 <= token < self.vocab_size for token in ids):
            raise InvalidRequest("prompt holds a token id that this model does not have.", param="prompt")

    async def tokenize(self, prompt: str | Chat, *, add_special_tokens: bool = True, tenant: str = "") -> list[int]:
        if isinstance(prompt, Chat):
            prompt = "".join(f"{message['role']}: {message['content']}\n" for message in prompt.messages)
        return [ord(character) for character in prompt]

    async def render(self, chat: Chat) -> str:
        return "".join(chr(token) for token in await self.tokenize(chat))

    async def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.check_ids(ids)
        return "".join(chr(token) for token in ids)

    async def token_strings(self, ids: Sequence[int]) -> list[str]:
        return [chr(token) for token in ids]

    async def abort(self, request_id: str | None = None, *, all: bool = False, tenant: str | None = None) -> int:
        chosen = [
            s
            for s in self.open
            if not s.ended and (all or request_id in (s.request_id, s.label)) and tenant in (None, s.tenant)
        ]
        for stream in chosen:
            stream.aborted.set()
        return len(chosen)

    async def flush_cache(self) -> bool:
        if self.open:
            return False
        self.flushed += 1
        return True

    def actors(self) -> list[ActorStatus]:
        return self.company

    def health(self) -> Health:
        return Health(ok=self.healthy, reason="" if self.healthy else "worker-0 owes a step", step_age=0.0, actors=[])

    def begin_drain(self) -> None:
        self.status = EngineStatus(phase="draining", progress=1.0, stage="draining")

    async def drain(self, timeout: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                for stream in list(self.open):
                    await stream.over.wait()
        return not self.open

    async def pause_generation(self, mode: str = "abort") -> None:
        self.paused = mode

    async def continue_generation(self) -> None:
        self.paused = ""

    def loads(self) -> list[ReplicaLoad]:
        return [
            ReplicaLoad(
                dp_rank=rank,
                num_running_reqs=len(self.open),
                num_waiting_reqs=rank,
                num_total_reqs=len(self.open) + rank,
                num_used_tokens=10,
                num_total_tokens=10 + rank,
                max_total_num_tokens=100,
                token_usage=0.1,
                cache_hit_rate=0.0,
                utilization=0.5,
                max_running_requests=16,
                paused=False,
            )
            for rank in range(2)
        ]

    def describe(self) -> dict[str, Any]:
        return {
            "workers": [{"pid": 4242, "device": "cpu", "restarts": 0, "state": "running"}],
            "actors": [],
            "arguments": self.arguments.describe(),
            "requests": {"live": len(self.open), "sequences": len(self.open), "refused": 0},
            "scheduler": None,
            "model_info": None,
            "cache": {"total": 100, "free": 100},
        }


class Server:
    """Starts real Hypercorn servers on free loopback ports. Calling it with an application returns its base URL."""

    def __init__(self) -> None:
        self._running: list[tuple[asyncio.Event, asyncio.Task[None]]] = []

    async def __call__(self, application: Troupe) -> str:
        config = hypercorn.config.Config()
        config.bind = ["127.0.0.1:0"]
        config.graceful_timeout = 0.2
        config.errorlog = None
        sockets = config.create_sockets()
        sockets.insecure_sockets[0].listen()  # connections wait until the server takes them
        port = sockets.insecure_sockets[0].getsockname()[1]
        stop = asyncio.Event()
        wrapped = hypercorn.utils.wrap_app(application, config.wsgi_max_body_size, None)
        task = asyncio.create_task(
            hypercorn.asyncio.run.worker_serve(wrapped, config, sockets=sockets, shutdown_trigger=stop.wait)
        )
        self._running.append((stop, task))
        return f"http://127.0.0.1:{port}"

    def stop(self) -> None:
        """As a signal to a plain Hypercorn would."""
        for stop, _ in self._running:
            stop.set()

    async def aclose(self) -> None:
        self.stop()
        for _, task in self._running:
            await asyncio.wait_for(task, waiting.PATIENCE)
