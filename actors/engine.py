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
import itertools
import logging
import random
import secrets
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry

from actors.admission import Door, Ticket
from actors.arguments import ArgumentError, Arguments
from actors.company import Company
from actors.journal import Journal, JournalEntry
from actors.model_files import ModelFiles, resolve_model_path
from actors.protocol import (
    Abort,
    Decode,
    DecodeTokens,
    Encode,
    Flush,
    Render,
    SequenceSpec,
    Submit,
    TokenizerProtocol,
)
from actors.requests import (
    LIMITS,
    Chat,
    EngineDraining,
    EngineFailed,
    EngineNotReady,
    InvalidRequest,
    RequestAborted,
    RequestFailed,
    SamplingParams,
)
from actors.runtime import ActorDied, ActorStatus, ActorSystem, ChildCrash, Event, EventKind, MailboxFull, Message
from actors.sampling_rules import resolve, slot_sampling
from actors.status import EngineStatus, Health, Phase
from actors.streams import RequestStream, StreamBuffer
from actors.text_codec import TextCodec
from actors.vitals import Vitals
from kernels.step import ModelInfo
from telemetry.metrics import EngineMetrics

__all__ = ["Engine"]

R = TypeVar("R")

_log = logging.getLogger("troupe.engine")

_ENCODE_TIMEOUT = 120.0
_ASK_TIMEOUT = 30.0
_STALL_SECONDS = 60.0
"""A device that owes an answer this long is not healthy; the watchdog's limits come on top of it."""


class _Request(msgspec.Struct, eq=False):
    """A live request between its ticket and its end."""

    buffer: StreamBuffer
    prompt: str | Sequence[int] | Chat
    params: SamplingParams
    ticket: Ticket
    label: str | None
    priority: int
    salt: bytes
    arrival: float
    deadline: float | None
    sequences: tuple[int, ...] = ()
    prompt_tokens: int = 0


class Engine:
    """A model behind a company of actors.

    Keywords are the command line's long names (``Engine(model="path", max_running_requests=64)``); ``arguments``
    takes a
    ready :class:`Arguments` instead. ``registry`` receives the metrics; without it the engine makes its own.
    Raises :class:`ArgumentError` for wrong keywords.
    """

    def __init__(
        self, *, arguments: Arguments | None = None, registry: CollectorRegistry | None = None, **keywords: object
    ) -> None:
        if arguments is None:
            arguments = Arguments.from_keywords(**keywords)
        elif keywords:
            raise ArgumentError([f"{min(keywords)}: give either arguments or keywords, not both"])
        if arguments.model_path is None:
            raise ArgumentError(["model_path: give a model directory or a hub id, as in Engine(model=...)"])
        self.arguments = arguments
        self.model_name = arguments.model_name
        self.registry = registry or CollectorRegistry()
        self.metrics = EngineMetrics(self.registry, self.model_name, self._readings)
        self.generation_defaults: dict[str, Any] = {}
        self.model_info: ModelInfo | None = None
        self.context_length = 0
        self.vocab_size = 0
        self._eos_ids: tuple[int, ...] = ()
        self._journal = Journal()
        self._vitals = Vitals()
        self._door = Door(
            max_sequences=arguments.max_running_requests + arguments.max_queued_requests,
            max_tokens=arguments.max_queued_tokens,
        )
        self._requests: dict[str, _Request] = {}
        self._numbers = itertools.count(1)
        self._turns = itertools.count()
        # With --random-seed the same requests in the same order sample the same tokens after a new start.
        seed = arguments.random_seed
        self._seeds: random.Random = secrets.SystemRandom() if seed is None else random.Random(seed)
        self._phase: Phase = "starting"
        self._progress = (0.0, "waiting")
        self._error: str | None = None
        self._codec: TextCodec | None = None
        self._company: Company | None = None
        self._system: ActorSystem | None = None
        self._run: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._stop = asyncio.Event()
        self._broken = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    # -- life

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def start(self, *, wait: bool = True) -> None:
        """Put up the actors in the running loop and load the model. ``wait=False`` returns at once; see :attr:`status`.

        Raises EngineFailed with the reason when it cannot start (only when it waits).
        """
        if self._run is not None:
            raise RuntimeError("This engine was started before. Make a new one.")
        self._run = asyncio.create_task(self._live(), name="troupe-engine")
        if wait:
            try:
                await self._ready.wait()
            except BaseException:
                await self.aclose()
                raise
            if self._phase == "failed":
                await self.aclose()
                raise EngineFailed(self._error or "The engine could not start.")

    async def aclose(self) -> None:
        """End live requests with an error, stop the actors in reverse order, and leave nothing behind. Idempotent."""
        self._stop.set()
        if self._run is not None:
            await _finish(self._run)

    async def _live(self) -> None:
        """The engine's one task: owner of the actor system from start to end."""
        try:
            async with ActorSystem(name="troupe") as system:
                self._system = system
                system.on_event(self._on_event)
                await self._set_up(system)
                await _first(self._stop.wait(), self._broken.wait(), system.failed.wait())
                if not self._stop.is_set():
                    raise EngineFailed(
                        self._error or f"Actor {system.failed.actor} failed too often; the log says why."
                    )
        except Exception as error:
            self._fail(error)
        finally:
            if self._phase != "failed":
                self._phase = "stopped"
            self._journal.fail_all(EngineFailed(self._error or "The engine was stopped."))
            self._ready.set()
            self._system = None
            self._company = None

    def _fail(self, error: Exception) -> None:
        self._phase = "failed"
        self._error = str(error) or type(error).__name__
        _log.error("The engine failed: %s", self._error, exc_info=not isinstance(error, (ValueError, EngineFailed)))

    async def _set_up(self, system: ActorSystem) -> None:
        self._progress = (0.0, "model files")
        with ThreadPoolExecutor(1, thread_name_prefix="troupe-open") as thread:
            files, codec = await asyncio.get_running_loop().run_in_executor(thread, self._open_model)
        self._codec = codec
        self.vocab_size = files.vocab_size
        self.context_length = self.arguments.context_length or files.context_length
        self._eos_ids = files.eos_token_ids() or (codec.eos_from_tokenizer() if codec is not None else ())
        if self.arguments.sampling_defaults == "model":
            self.generation_defaults = dict(files.generation_config)
        preferred = self.arguments.preferred_sampling_params
        if "temperature" in preferred:
            self.generation_defaults.pop("do_sample", None)  # the server's temperature overrules the model's greediness
        self.generation_defaults.update(preferred)
        self._company = Company(
            system,
            self.arguments,
            files=files,
            codec=codec,
            journal=self._journal,
            vitals=self._vitals,
            context_length=self.context_length,
            on_progress=self._on_progress,
            on_ready=self._on_ready,
        )
        await self._company.assemble()

    def _open_model(self) -> tuple[ModelFiles, TextCodec | None]:
        a = self.arguments
        assert a.model_path is not None
        path = resolve_model_path(a.model_path, revision=a.revision, download_dir=a.download_dir)
        tokenizer_path: Path | None = None
        if a.tokenizer_path is not None:
            tokenizer_path = resolve_model_path(a.tokenizer_path, download_dir=a.download_dir, weights=False)
        files = ModelFiles(path, overrides=a.json_model_override_args, tokenizer_path=tokenizer_path)
        if a.skip_tokenizer_init:
            return files, None
        return files, TextCodec(files, mode=a.tokenizer_mode, chat_template=a.chat_template)

    def _on_progress(self, stage: str, fraction: float) -> None:
        self._progress = (fraction, stage)

    def _on_ready(self) -> None:
        assert self._vitals.worker is not None
        self.model_info, _ = self._vitals.worker
        self.context_length = self.model_info.context_length
        self.vocab_size = self.model_info.vocab_size
        self._progress = (1.0, "ready")
        if self._phase == "starting":
            self._phase = "ready"
        self._ready.set()

    def _on_event(self, event: Event) -> None:
        if event.kind is EventKind.RESTARTED:
            self.metrics.restarts.labels(event.actor).inc()
        elif event.kind is EventKind.DEAD_LETTER:
            self.metrics.dead_letters.labels(event.actor, event.message or "").inc()
        elif event.kind is EventKind.DIED and event.actor == "worker-0":
            self._vitals.worker_lost()
            self._progress = (0.0, "restarting the worker")
            if self.model_info is None:
                # What cannot be loaded once will not load the next time either: say why and give up.
                self._error = event.cause.reason if isinstance(event.cause, ChildCrash) else str(event.cause)
                self._broken.set()

    # -- requests

    def generate(
        self,
        prompt: str | Sequence[int] | Chat,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
    ) -> RequestStream:
        """Generate from a text, token ids or a conversation; an asynchronous iterator of deltas.

        Everything that can be refused without waiting is refused here: raises InvalidRequest, QueueFull,
        EngineNotReady,
        EngineDraining, EngineFailed. What needs the tokenizer is refused by ``await stream.ready()`` or the first
        delta.
        ``request_id`` is the caller's label for logs and :meth:`abort`; ``timeout`` is seconds for the whole request;
        ``cache_salt`` keeps its cached prefixes apart from those of other salts.
        """
        self._require_ready()
        params = resolve(params or SamplingParams(), self.generation_defaults)
        params.validate(vocab_size=self.vocab_size)
        self._check_call(prompt, params, request_id, priority, timeout, cache_salt)
        now = time.monotonic()
        if timeout is None:
            timeout = self.arguments.request_timeout
        ticket = self._door.enter(params.n, self._estimate(prompt) * params.n, now)
        buffer = StreamBuffer(f"req-{secrets.token_hex(12)}", params.n, interval=self.arguments.stream_interval)
        buffer.started_at = now
        self._requests[buffer.request_id] = _Request(
            buffer=buffer,
            prompt=prompt,
            params=params,
            ticket=ticket,
            label=request_id,
            priority=priority,
            salt=(cache_salt or "").encode(),
            arrival=now,
            deadline=None if timeout is None else now + timeout,
        )
        self._idle.clear()
        return RequestStream(
            buffer,
            label=request_id,
            deadline=None if timeout is None else now + timeout,
            admit=self._admit,
            release=self._release,
        )

    def _require_ready(self) -> None:
        phase = self._phase
        if phase == "starting":
            raise EngineNotReady(
                f"The engine is starting ({self._progress[1]}, {self._progress[0]:.0%}). Try again soon."
            )
        if phase == "draining":
            raise EngineDraining("The engine is shutting down and takes no new requests.")
        if phase == "failed":
            raise EngineFailed(self._error or "The engine failed.")
        if phase == "stopped":
            raise EngineFailed("The engine was closed.")

    def _check_call(
        self,
        prompt: str | Sequence[int] | Chat,
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        timeout: float | None,
        cache_salt: str | None,
    ) -> None:
        if isinstance(prompt, (str, Chat)):
            if self._codec is None:
                raise InvalidRequest(
                    "This server runs without a tokenizer (--skip-tokenizer-init): send token ids.", param="prompt"
                )
        else:
            if not len(prompt):
                raise InvalidRequest("prompt holds no token. Send at least one.", param="prompt")
            if len(prompt) > self.context_length:
                raise self._too_long(len(prompt), None)
            self._check_ids(prompt)
        if params.stop and self._codec is None:
            raise InvalidRequest("stop strings need a tokenizer: use stop_token_ids.", param="stop")
        if cache_salt is not None and len(cache_salt) > LIMITS.cache_salt_chars:
            raise InvalidRequest(f"cache_salt is longer than {LIMITS.cache_salt_chars} characters.", param="cache_salt")
        if request_id is not None and len(request_id) > LIMITS.request_id_chars:
            raise InvalidRequest(f"rid is longer than {LIMITS.request_id_chars} characters.", param="rid")
        if not -(2**31) <= priority < 2**31:
            raise InvalidRequest("priority must be a 32-bit integer.", param="priority")
        if (
            priority
            and self.arguments.abort_on_priority_when_disabled
            and not self.arguments.enable_priority_scheduling
        ):
            raise InvalidRequest(
                "priority is set, but the server runs without --enable-priority-scheduling. Leave it out.",
                param="priority",
            )
        if timeout is not None and not 0 < timeout <= 86400:
            raise InvalidRequest("timeout must be more than 0 and at most 86400 seconds.", param="timeout")

    def _check_ids(self, ids: Sequence[int]) -> None:
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.vocab_size:
            raise InvalidRequest(
                f"prompt holds token id {low if low < 0 else high}; this model's ids are 0 to {self.vocab_size - 1}.",
                param="prompt",
            )

    def _estimate(self, prompt: str | Sequence[int] | Chat) -> int:
        """Prompt tokens before anything is encoded; set right afterwards."""
        if isinstance(prompt, str):
            return len(prompt) // 4 + 1
        if isinstance(prompt, Chat):
            return sum(len(m["content"]) if isinstance(m.get("content"), str) else 0 for m in prompt.messages) // 4 + 8
        return len(prompt)

    def _too_long(self, length: int, max_tokens: int | None) -> InvalidRequest:
        if max_tokens is None or length >= self.context_length:
            return InvalidRequest(
                f"The prompt has {length} tokens; this model's context is {self.context_length}, and at least one must "
                "be left for the answer. Shorten the prompt.",
                param="prompt",
                code="context_length_exceeded",
            )
        return InvalidRequest(
            f"{length} prompt tokens and max_tokens {max_tokens} are more than the context of {self.context_length}. "
            f"Ask for at most {self.context_length - length} tokens.",
            param="max_tokens",
            code="context_length_exceeded",
        )

    async def _admit(self, buffer: StreamBuffer) -> int:
        """Render, encode, check, write into the journal and submit; the prompt's length in tokens."""
        request = self._requests.get(buffer.request_id)
        if request is None:
            raise RequestAborted("The request was aborted.")
        params = request.params
        prompt = request.prompt
        ids = await self._encode(prompt) if isinstance(prompt, (str, Chat)) else list(prompt)
        bad_words = [await self._encode_words(word) for word in params.bad_words]
        if buffer.request_id not in self._requests:
            raise buffer.error or RequestAborted("The request was aborted.")
        self._require_alive()

        room = self.context_length - len(ids)
        max_tokens = params.max_tokens
        if self.arguments.allow_auto_truncate:
            if room < 1:
                ids = ids[: self.context_length - min(max_tokens or 1, self.context_length - 1)]
                room = self.context_length - len(ids)
            max_tokens = min(max_tokens or room, room)
        if not ids:
            raise InvalidRequest("The prompt is empty: it has no tokens. Send some text.", param="prompt")
        if room < 1 or (max_tokens is not None and max_tokens > room):
            raise self._too_long(len(ids), max_tokens)

        self._door.correct(request.ticket, len(ids) * params.n)
        request.prompt_tokens = len(ids)
        self._submit_entries(request, ids, max_tokens or room, tuple(w for words in bad_words for w in words))
        assert self._company is not None
        specs = tuple(entry.spec for s in request.sequences if (entry := self._journal.get(s)) is not None)
        await self._company.scheduler.tell(Submit(sequences=specs))
        return len(ids)

    def _submit_entries(
        self, request: _Request, ids: list[int], max_tokens: int, bad_words: tuple[tuple[int, ...], ...]
    ) -> None:
        params = request.params
        packed = np.asarray(ids, dtype=np.int32).tobytes()
        seed = params.seed if params.seed is not None else self._fresh_seed()
        stop_ids = tuple(dict.fromkeys((*(() if params.ignore_eos else self._eos_ids), *params.stop_token_ids)))
        numbers = []
        for index in range(params.n):
            number = next(self._numbers)
            spec = SequenceSpec(
                sequence=number,
                prompt=packed,
                sampling=slot_sampling(params, index=index, seed=seed, stop_ids=stop_ids, bad_words=bad_words),
                max_tokens=max_tokens,
                min_tokens=params.min_tokens,
                stop_ids=stop_ids,
                priority=request.priority if self.arguments.enable_priority_scheduling else 0,
                arrival=request.arrival,
                deadline=request.deadline,
                salt=request.salt,
            )
            self._journal.open(
                JournalEntry(
                    sequence=number,
                    index=index,
                    spec=spec,
                    params=params,
                    stream=request.buffer,
                    prompt_ids=ids,
                    output=[],
                )
            )
            numbers.append(number)
        request.sequences = tuple(numbers)

    def _fresh_seed(self) -> int:
        return self._seeds.getrandbits(63)

    def _require_alive(self) -> None:
        if self._phase in ("failed", "stopped"):
            raise EngineFailed(self._error or "The engine was closed.")

    async def _encode(self, prompt: str | Chat, *, add_special_tokens: bool = True) -> list[int]:
        return (await self._ask_tokenizer(Encode(prompt=prompt, add_special_tokens=add_special_tokens))).token_ids

    async def _encode_words(self, word: str) -> list[tuple[int, ...]]:
        """A bad word's token sequences: at the start of a text, and after a space."""
        bare = await self._encode(word, add_special_tokens=False)
        spaced = await self._encode(" " + word.lstrip(" "), add_special_tokens=False)
        return list(dict.fromkeys(tuple(ids) for ids in (bare, spaced) if ids))

    async def _ask_tokenizer(self, message: Message[TokenizerProtocol, R]) -> R:
        company = self._require_company()
        if not company.tokenizers:
            raise InvalidRequest(
                "This server runs without a tokenizer (--skip-tokenizer-init): send token ids.", param="prompt"
            )
        ref = company.tokenizers[next(self._turns) % len(company.tokenizers)]
        try:
            return await ref.ask(message, timeout=_ENCODE_TIMEOUT)
        except ActorDied:
            # The actor is back by now; a text that kills it twice is the text's fault.
            try:
                return await ref.ask(message, timeout=_ENCODE_TIMEOUT)
            except ActorDied as error:
                raise RequestFailed("The tokenizer failed on this request.") from error

    def _require_company(self) -> Company:
        if self._company is None or self._phase == "starting":
            self._require_ready()
            raise EngineNotReady("The engine was not started. Use `async with engine` or await engine.start().")
        return self._company

    def _release(self, buffer: StreamBuffer) -> None:
        """A stream is over, by its end or by its reader's going: forget it, and abort what still runs of it."""
        request = self._requests.pop(buffer.request_id, None)
        if request is None:
            return
        now = time.monotonic()
        unfinished = tuple(s for s in request.sequences if s in self._journal)
        for sequence in unfinished:
            self._journal.drop(sequence)
        if unfinished and self._company is not None:
            # When even the control lane is full, the detokenizer refuses their next tokens and stops them.
            with contextlib.suppress(MailboxFull):
                self._company.scheduler.offer(Abort(sequences=unfinished))
        self._door.leave(request.ticket, now)
        self._count_end(request, now, aborted=bool(unfinished) or not request.sequences)
        if not self._requests:
            self._idle.set()

    def _count_end(self, request: _Request, now: float, *, aborted: bool) -> None:
        buffer = request.buffer
        error = type(buffer.error).__name__ if buffer.error is not None else "abort" if aborted else ""
        first = buffer.first_token_at
        self.metrics.request_ended(
            reason="error" if buffer.error is not None else "abort" if aborted else buffer.finish_reason,
            error_type=error,
            duration=now - request.arrival,
            first_token=None if first is None else first - request.arrival,
            prompt_tokens=request.prompt_tokens,
            output_tokens=buffer.output_tokens,
        )

    async def abort(self, request_id: str | None = None, *, all: bool = False) -> int:
        """Abort the requests of this id (the engine's, or the callers' label, both exactly), or all; how many."""
        chosen = [r for r in self._requests.values() if all or request_id in (r.buffer.request_id, r.label)]
        for request in chosen:
            unfinished = tuple(s for s in request.sequences if s in self._journal)
            for sequence in unfinished:
                self._journal.drop(sequence)
            request.buffer.fail(RequestAborted("The request was aborted."))
            if unfinished and self._company is not None:
                await self._company.scheduler.tell(Abort(sequences=unfinished))
        return len(chosen)

    # -- text

    async def tokenize(self, prompt: str | Chat, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text or a conversation."""
        return await self._encode(prompt, add_special_tokens=add_special_tokens)

    async def render(self, chat: Chat) -> str:
        """A conversation as the text that the model gets."""
        return await self._ask_tokenizer(Render(chat=chat))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        ids = list(token_ids)
        if ids:
            self._check_ids(ids)
        return await self._ask_tokenizer(Decode(token_ids=ids, skip_special_tokens=skip_special_tokens))

    async def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Each token's own text; U+FFFD for a token that is part of a character."""
        return await self._ask_tokenizer(DecodeTokens(token_ids=list(token_ids)))

    # -- operation

    @property
    def status(self) -> EngineStatus:
        progress, stage = self._progress
        return EngineStatus(phase=self._phase, progress=progress, stage=stage, error=self._error)

    def begin_drain(self) -> None:
        """Refuse new requests from now on; live ones go on."""
        if self._phase in ("starting", "ready"):
            self._phase = "draining"

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait until the live ones end; at the deadline (seconds) the rest end with an error.

        True when all ended by themselves.
        """
        self.begin_drain()
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
            return True
        except TimeoutError:
            self._journal.fail_all(EngineDraining("The server is shutting down; the answer is not complete."))
            for request in list(self._requests.values()):
                request.buffer.fail(EngineDraining("The server is shutting down; the answer is not complete."))
            return False

    async def flush_cache(self) -> bool:
        """Empty the prefix cache; False, and nothing is done, while requests run or wait."""
        return await self._require_company().scheduler.ask(Flush(), timeout=_ASK_TIMEOUT)

    def health(self) -> Health:
        """Whether work makes progress. Asks nobody: a probe must not wait in a mailbox."""
        now = time.monotonic()
        age = self._vitals.step_age(now)
        actors = self._actors()
        reason = ""
        if self._phase == "failed":
            reason = self._error or "The engine failed."
        elif self._phase in ("starting", "stopped"):
            reason = f"The engine is {self._phase}."
        elif self._vitals.worker is None:
            reason = "No worker is ready; one is being restarted."
        elif age > _STALL_SECONDS:
            reason = f"The worker has not answered a step for {age:.0f} s."
        return Health(ok=not reason, reason=reason or "ok", step_age=age, actors=actors)

    def describe(self) -> dict[str, Any]:
        """Everything an operator may want to know, without secrets: for /server_info."""
        load = self._vitals.scheduler
        cache = self._vitals.cache()
        actors = self._actors()
        return {
            "model": self.model_name,
            "status": msgspec.to_builtins(self.status),
            "workers": [
                {
                    "name": actor.name,
                    "pid": actor.pid,
                    "device": self.model_info.device if self.model_info is not None else self.arguments.device,
                    "restarts": actor.incarnation or 0,
                    "state": actor.state,
                }
                for actor in actors
                if actor.name.startswith("worker-")
            ],
            "model_info": msgspec.to_builtins(self.model_info) if self.model_info is not None else None,
            "scheduler": msgspec.to_builtins(load) if load is not None else None,
            "cache": msgspec.to_builtins(cache) if cache is not None else None,
            "requests": {"live": len(self._requests), "sequences": self._door.sequences, "refused": self._door.refused},
            "actors": msgspec.to_builtins(actors),
            "arguments": self.arguments.describe(),
        }

    def _actors(self) -> list[ActorStatus]:
        return self._system.describe() if self._system is not None else []

    def _readings(self) -> dict[str, float]:
        load = self._vitals.scheduler
        cache = self._vitals.cache()
        found: dict[str, float] = {
            "troupe_ready": float(self._phase == "ready"),
            "troupe_steps_total": self._vitals.steps,
            "troupe_step_run_seconds_total": self._vitals.step_run_seconds,
            "troupe_admission_rejections_total": self._door.refused,
        }
        if load is not None:
            found |= {
                "troupe_requests_running": load.running,
                "troupe_requests_waiting": load.waiting,
                "troupe_waiting_tokens": load.waiting_tokens,
                "troupe_steps_in_flight": load.steps_in_flight,
                "troupe_preemptions_total": load.preemptions,
            }
        if cache is not None:
            found |= {
                "troupe_cache_pages": cache.total,
                "troupe_cache_pages_free": cache.free,
                "troupe_cache_pages_evictable": cache.evictable,
                "troupe_cache_pages_used": cache.used,
                "troupe_cache_hit_tokens_total": cache.hit_tokens,
                "troupe_cache_queried_tokens_total": cache.queried_tokens,
            }
        return found


async def _first(*awaitables: Coroutine[Any, Any, object]) -> None:
    """Return when one of them is done; the others are cancelled."""
    tasks = [asyncio.create_task(awaitable) for awaitable in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _finish(task: asyncio.Task[None]) -> None:
    """Wait for a task to its end, also when the waiter is cancelled meanwhile; the cancellation comes after."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                break
            cancelled = error
    if cancelled is not None:
        raise cancelled
