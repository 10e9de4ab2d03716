"""Intake: admits requests, and releases them at their end.

A request is checked and takes a permit, without waiting. Then it is rendered and encoded by a tokenizer, measured,
written into the journal and submitted to the scheduler. When its stream is over, the permit is released and
what still runs of it is aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import random
import secrets
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from actors.boards.journal import JournalEntry
from actors.boards.stream_buffer import StreamBuffer
from actors.boards.wake_limiter import WakeLimiter
from actors.faults import FaultInjector
from actors.options import Arguments
from actors.protocol import Abort, SequenceSpec, Submit
from actors.protocol.requests import (
    LIMITS,
    Chat,
    InvalidRequest,
    RequestAborted,
    RequestTimeout,
    SamplingParams,
    Thought,
)
from actors.requests.adapters import Adapter, Adapters
from actors.requests.admission import AdmissionControl, Permit
from actors.requests.grammar_compiles import GrammarCompiles
from actors.requests.request_rules import Prompt, RequestOptions, RequestRules, permit_tokens
from actors.requests.router import Route, Router
from actors.requests.sampling_rules import resolve, slot_sampling, validate
from actors.requests.streams import RequestStream
from actors.runtime import MailboxFull, current_traceparent
from actors.text.encoding import Encoding, characters
from actors.text.served_model import ServedModel
from kernels.contract.tasks import Classify, Embed, Generate, NextToken, Score, Task
from telemetry.metrics.options import ADAPTER
from telemetry.timeline import Outcome, RequestTimeline, Timelines, Value

__all__ = ["GENERATE", "Intake", "grammar_start"]

GENERATE = Generate()

_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, speculative=False)
_TASK_PARAMS = {
    Embed: _ONE_TOKEN,
    Score: msgspec.structs.replace(_ONE_TOKEN, prompt_logprobs=0),
    Classify: _ONE_TOKEN,
    NextToken: _ONE_TOKEN,
}
"""Parameters of tasks that generate nothing. The step that ends the prompt samples one token, which is dropped."""

_READERS_A_TURN = 32
"""Streams that are woken in one turn of the loop: each may cost its reader a write to a socket."""


class _Request(msgspec.Struct, eq=False):
    """A live request between its permit and its end. Times are ``time.monotonic`` seconds."""

    buffer: StreamBuffer
    timeline: RequestTimeline
    prompt: Prompt
    params: SamplingParams
    permit: Permit
    label: str | None
    priority: int
    salt: bytes
    replica: int | None  # that the client names
    arrival: float
    deadline: float | None
    start_by: float | None
    sequences: tuple[int, ...] = ()
    prompt_tokens: int = 0
    max_tokens: int | None = None  # tokens that are kept of the prompt
    route: Route | None = None  # from its submission on
    task: Task = GENERATE
    adapter: Adapter | None = None


class Intake:
    """Live requests of one engine."""

    def __init__(
        self,
        arguments: Arguments,
        model: ServedModel,
        *,
        encoding: Encoding,
        router: Router,
        timelines: Timelines,
        adapters: Adapters | None = None,
        faults: FaultInjector | None = None,
    ) -> None:
        running = arguments.max_running_requests * arguments.data_parallel_size
        self.admission = AdmissionControl(
            max_sequences=running + arguments.max_queued_requests,
            max_tokens=arguments.max_queued_tokens,
            tenants=max(1, len(arguments.api_keys)),
            busy_from=running,
        )
        self.encoding = encoding
        self.idle = asyncio.Event()
        self.idle.set()
        self._arguments = arguments
        self._model = model
        self._rules = RequestRules(arguments, model, encoding)
        self._router = router
        self._faults = faults
        self._timelines = timelines
        self._adapters = adapters
        self._requests: dict[str, _Request] = {}
        self._numbers = itertools.count(1)
        self._grammars = GrammarCompiles(max(1, len(arguments.api_keys)), len(router.routes))
        self._readers = WakeLimiter(_READERS_A_TURN)
        # With --random-seed the same requests in the same order sample the same tokens after a new start.
        seed = arguments.random_seed
        self._seeds = random.Random(secrets.randbits(128) if seed is None else seed)

    def __len__(self) -> int:
        return len(self._requests)

    # -- admission

    def open(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        timeline: RequestTimeline,
        options: RequestOptions,
        task: Task = GENERATE,
    ) -> RequestStream:
        """Check what can be checked at once and take the permit. The stream has the timeline's id."""
        timeline.request |= _sampling_attributes(params)
        if timeline.content is not None:
            timeline.content.input = prompt
        if task is not GENERATE:
            params = _TASK_PARAMS.get(type(task), params)
        params = resolve(params, self._model.generation_defaults)
        validate(params, vocab_size=self._model.vocab_size)
        max_prompt = None
        if isinstance(task, Embed | Classify):
            max_prompt = self._model.truncation_limit(options.truncate)
        elif options.truncate is not None:
            raise InvalidRequest(
                "truncate_prompt_tokens: is for embedding and classifying; shorten the prompt.",
                param="truncate_prompt_tokens",
            )
        if isinstance(task, Embed):
            prompt = self._behind_prompt(prompt, task)
        self._rules.check(prompt, params, options, cuts=max_prompt is not None)
        if params.n > self.admission.max_choices:
            raise InvalidRequest(
                f"n {params.n} is more than the {self.admission.max_choices} that one client may have. Lower it.",
                param="n",
            )
        if task is not GENERATE or self._model.pooling is not None:
            self._model.require_task(task)
        salt = _salt(options.cache_salt)
        adapter = None
        if options.adapter is not None and self._adapters is not None:
            adapter = self._adapters.require(options.adapter)
            salt = adapter.salt + salt
            timeline.request[ADAPTER] = adapter.name
        self._check_replica(options.replica)
        now = time.monotonic()
        timeout = self._arguments.request_timeout if options.timeout is None else options.timeout
        deadline = None if timeout is None else now + timeout
        limit = self._arguments.request_waiting_timeout
        expected = min(params.max_tokens or params.default_max_tokens or 0, self._model.context_length)
        permit = self.admission.admit(params.n, permit_tokens(_estimate(prompt), expected, params), now, options.tenant)
        admission = timeline.open_hop("admission")
        if admission is not None:
            timeline.finish(admission, now, choices=params.n, priority=options.priority)
        buffer = StreamBuffer(
            timeline,
            params.n,
            interval=self._arguments.stream_interval,
            wake_limiter=self._readers,
            shares_prompt_logprobs=params.n > 1 and params.prompt_logprobs is not None,
        )
        self._requests[buffer.request_id] = _Request(
            buffer=buffer,
            timeline=timeline,
            prompt=prompt,
            params=params,
            permit=permit,
            label=options.label,
            priority=options.priority,
            salt=salt,
            replica=options.replica,
            arrival=now,
            deadline=deadline,
            start_by=None if limit is None else now + limit,
            max_tokens=max_prompt,
            task=task,
            adapter=adapter,
        )
        if adapter is not None and self._adapters is not None:
            self._adapters.use(adapter)
        self.idle.clear()
        return RequestStream(
            buffer,
            label=options.label,
            deadline=deadline,
            admit=self._admit,
            release=self._release,
            faults=self._faults,
        )

    def _behind_prompt(self, prompt: Prompt, task: Embed) -> Prompt:
        """The input of an embedding; a model's prompt stands before texts only."""
        if isinstance(prompt, str):
            return self._model.prompted(prompt, task.prompt)
        if task.prompt is not None:
            raise InvalidRequest("prompt_name: is for texts, and the input is token ids.", param="prompt_name")
        return prompt

    # -- submission

    async def _admit(self, buffer: StreamBuffer) -> Sequence[int]:
        """Render, encode, measure, write into the journal and submit; the prompt's tokens."""
        # What the actors do for the request belongs to its own span, and no longer to what brought it.
        trace = current_traceparent.set(buffer.timeline.traceparent)
        try:
            return await self._submit(buffer)
        finally:
            current_traceparent.reset(trace)

    async def _submit(self, buffer: StreamBuffer) -> Sequence[int]:
        request = self._wanted(buffer)
        if self._faults is not None:
            await self._faults.strike_async("admission")
        params, prompt, encoding = request.params, request.prompt, self.encoding
        if isinstance(prompt, (str, Chat)):
            ids = await encoding.tokenize(prompt, request.timeline, request.permit.tenant, request.max_tokens)
        else:
            ids = list(prompt)[: request.max_tokens]
        bad_words = [ids for word in params.bad_words for ids in await encoding.spellings(word)]
        prediction = b""
        if params.prediction:
            predicted = await encoding.encode(params.prediction, add_special_tokens=False)
            prediction = np.asarray(predicted, dtype=np.int32).tobytes()
        self._wanted(buffer)
        length = len(ids)
        ids, max_tokens = self._rules.measure(ids, params)
        if isinstance(request.task, Score | NextToken) and len(ids) < length:
            raise self._model.too_long(length, None)  # the numbers would be those of another prompt
        if isinstance(request.task, Score) and request.task.start >= len(ids):
            raise InvalidRequest(
                f"start {request.task.start} leaves no token to score in a prompt of {len(ids)}. Lower it.",
                param="task",
            )
        self.admission.resize(request.permit, permit_tokens(len(ids), max_tokens, params))
        request.prompt_tokens = request.timeline.prompt_tokens = len(ids)
        packed, tenant = np.asarray(ids, dtype=np.int32).tobytes(), request.permit.tenant
        route = self._router.choose(packed, request.salt, request.replica)
        if params.grammar is not None:
            while True:
                workers = route.board.worker
                await self._grammars.compile(params.grammar, route, tenant)
                if route.board.worker is workers:
                    break
                # The workers died, or others are ready now.
                route = self._router.choose(packed, request.salt, request.replica)
            self._wanted(buffer)
        request.route = route
        specs = self._write_down(
            request, route, packed, ids, max_tokens, bad_words=tuple(bad_words), prediction=prediction
        )
        await route.scheduler.tell(Submit(sequences=specs))
        return ids

    def _wanted(self, buffer: StreamBuffer) -> _Request:
        """The request, or what ended it: it was aborted, the engine has ended, or its stream was closed."""
        if buffer.error is not None:
            raise buffer.error
        request = self._requests.get(buffer.request_id)
        if request is None:
            raise RequestAborted("The stream was closed before the request was accepted.")
        return request

    def _check_replica(self, replica: int | None) -> None:
        count = len(self._router.routes)
        if replica is not None and not 0 <= replica < count:
            raise InvalidRequest(
                f"data_parallel_rank: {replica}, but replicas are numbered from 0 and there are {count}. Leave it out, "
                "or see --data-parallel-size.",
                param="data_parallel_rank",
            )

    def hand_over(self, route: Route) -> list[int]:
        """Move the live requests of a replica whose workers have died to replicas that are ready, each to the one that
        the router chooses; returns the sequences that moved.

        Where none is ready, they wait for their own workers. So does a request with a sequence that was alone in a lost
        step: it may kill the next replica, too.
        """
        now = time.monotonic()
        stays = route.journal.suspects.were_alone()
        moves: dict[int, tuple[Route, list[tuple[_Request, list[JournalEntry]]]]] = {}  # by the target's number
        for request in self._requests.values():
            if request.route is not route or not stays.isdisjoint(request.sequences):
                continue
            entries = [entry for each in request.sequences if (entry := route.journal.get(each)) is not None]
            if not entries:
                continue
            target = self._router.choose(entries[0].spec.prompt, request.salt)
            if target is route or target.board.worker is None:
                break
            moves.setdefault(target.number, (target, []))[1].append((request, entries))
        moved: list[int] = []
        for target, requests in moves.values():
            entries = [entry for _, each in requests for entry in each]
            specs = tuple(entry.resume_spec() for entry in entries)
            try:  # all at once: groups of suspects stay together
                target.scheduler.offer(Submit(sequences=specs, moved=True))
            except MailboxFull:
                continue
            sequences = [entry.sequence for entry in entries]
            route.journal.move(sequences, target.journal)
            moved += sequences
            for request, _ in requests:
                request.route = target
                request.timeline.mark("handed_over", now, replica=target.number)
        return moved

    def _write_down(
        self,
        request: _Request,
        route: Route,
        packed: bytes,
        ids: list[int],
        max_tokens: int,
        *,
        bad_words: tuple[tuple[int, ...], ...],
        prediction: bytes,
    ) -> tuple[SequenceSpec, ...]:
        params, now = request.params, time.monotonic()
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        # A text that is complete by its grammar ends, whatever else the request asks for.
        eos_ids = () if params.ignore_eos and params.grammar is None else self._model.eos_ids
        stop_ids = tuple(dict.fromkeys((*eos_ids, *params.stop_token_ids)))
        start: tuple[tuple[int, ...], int] = ((), -1)
        if params.grammar is not None and params.thought is not None and self._model.codec is not None:
            start = grammar_start(params.thought, ids, self._model.codec.mark)
        # The first choice scores the prompt for all; the others wait for its pages in the prefix cache.
        unscored = msgspec.structs.replace(params, prompt_logprobs=None)
        specs = tuple(
            SequenceSpec(
                sequence=next(self._numbers),
                prompt=packed,
                sampling=slot_sampling(
                    unscored if index else params,
                    index=index,
                    seed=seed,
                    stop_ids=stop_ids,
                    bad_words=bad_words,
                    grammar_start=start,
                    prediction=prediction,
                ),
                max_tokens=max_tokens,
                min_tokens=params.min_tokens if params.grammar is None else 0,
                stop_ids=stop_ids,
                priority=request.priority if self._arguments.enable_priority_scheduling else 0,
                arrival=request.arrival,
                deadline=request.deadline,
                start_by=request.start_by,
                salt=request.salt,
                adapter=0 if request.adapter is None else request.adapter.index,
                task=request.task,
                tenant=request.permit.tenant,
            )
            for index in range(params.n)
        )
        for index, spec in enumerate(specs):
            route.journal.open(
                JournalEntry(
                    sequence=spec.sequence,
                    index=index,
                    spec=spec,
                    params=params,
                    stream=request.buffer,
                    timeline=request.timeline,
                    prompt_ids=ids,
                    output=[],
                )
            )
            request.timeline.begin("queue", now, index)
        request.sequences = tuple(spec.sequence for spec in specs)
        return specs

    # -- release

    def _release(self, buffer: StreamBuffer) -> None:
        """A stream is over, by its end or because its reader has gone."""
        request = self._requests.pop(buffer.request_id, None)
        if request is None:
            return
        now = time.monotonic()
        if request.adapter is not None and self._adapters is not None:
            self._adapters.leave(request.adapter)
        buffer.end(now)
        unfinished = self._drop(request)
        if request.route is not None:
            _abort(request.route, unfinished)
        reader_left = buffer.error is None and (bool(unfinished) or not request.sequences)
        if reader_left:
            request.timeline.mark("client_gone", now)
        elif isinstance(buffer.error, RequestTimeout):
            request.timeline.mark("deadline", now)
        self.admission.release(request.permit, now)
        self._count(request, reader_left=reader_left)
        if not self._requests:
            self.idle.set()

    def _drop(self, request: _Request) -> tuple[int, ...]:
        """Close what is open of a request in the journal; its sequences."""
        if request.route is None:
            return ()
        journal = request.route.journal
        unfinished = tuple(sequence for sequence in request.sequences if sequence in journal)
        for sequence in unfinished:
            journal.drop(sequence)
        return unfinished

    def abort(self, request_id: str | None, *, all_: bool, tenant: str | None = None) -> int:
        """Abort the requests of this id (the engine's own, or the caller's label), or all; how many there were.

        With a ``tenant`` only those of that one.
        """
        chosen = [
            request
            for request in self._requests.values()
            if (tenant is None or tenant == request.permit.tenant)
            and (all_ or (request_id is not None and request_id in (request.buffer.request_id, request.label)))
        ]
        now = time.monotonic()
        for request in chosen:
            request.timeline.mark("aborted", now)
        self._end(chosen, RequestAborted("The request was aborted."))
        return len(chosen)

    def fail_all(self, error: Exception) -> None:
        """End every live request with ``error``."""
        self._end(self._requests.values(), error)

    def _end(self, requests: Iterable[_Request], error: Exception) -> None:
        unfinished: dict[int, tuple[Route, list[int]]] = {}  # by the identity of the route
        for request in requests:
            if request.route is not None:
                unfinished.setdefault(id(request.route), (request.route, []))[1].extend(self._drop(request))
            # A copy for each request: raising an error writes a traceback into it.
            request.buffer.fail(copy.copy(error))
        for route, sequences in unfinished.values():
            _abort(route, sequences)

    def _count(self, request: _Request, *, reader_left: bool) -> None:
        """The end of a request, in its timeline."""
        buffer = request.buffer
        if reader_left or isinstance(buffer.error, RequestAborted):
            reason, error = "abort", "abort"
        elif buffer.error is not None:
            reason, error = "error", type(buffer.error).__name__
        else:
            reason, error = buffer.finish_reasons[-1], ""
        message = "The reader left before the end." if reader_left else str(buffer.error or "")
        reasons = tuple(each or reason for each in buffer.finish_reasons) if request.sequences else ()
        self._timelines.close(request.timeline, Outcome(finish_reasons=reasons, error_type=error, message=message))


_PROMPT_END = 16
"""Tokens of a prompt in which a mark is searched: white space and an empty thought may follow it."""


def grammar_start(
    thought: Thought, prompt: Sequence[int], encode: Callable[[str], tuple[int, ...]]
) -> tuple[tuple[int, ...], int]:
    """Where a grammar begins: SlotSampling's reasoning_end_ids and reasoning_start_id."""
    begin, end = encode(thought.begin), encode(thought.end)
    tail = tuple(prompt[-_PROMPT_END:])
    opened, closed = _last(tail, begin), _last(tail, end)
    if closed > opened:
        return (), -1
    if opened >= 0 or thought.always:
        return end, -1
    return (end, begin[0]) if len(begin) == 1 else ((), -1)


def _last(tokens: tuple[int, ...], part: tuple[int, ...]) -> int:
    """Where ``part`` stands last in ``tokens``; -1: nowhere."""
    result = [at for at in range(len(tokens) - len(part) + 1) if part and tokens[at : at + len(part)] == part]
    return result[-1] if result else -1


def _abort(route: Route, sequences: Sequence[int]) -> None:
    if sequences:
        # When even the control lane is full, the detokenizer refuses their next tokens and stops them.
        with contextlib.suppress(MailboxFull):
            route.scheduler.offer(Abort(sequences=tuple(sequences)))


def _sampling_attributes(params: SamplingParams) -> dict[str, Value]:
    """What the request sets, by its OpenTelemetry names."""
    given: dict[str, Value | None] = {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.stop_sequences": params.stop or None,
        "gen_ai.request.choice.count": params.n if params.n != 1 else None,
    }
    return {name: value for name, value in given.items() if value is not None}


def _salt(cache_salt: str | None) -> bytes:
    if cache_salt is not None and len(cache_salt) > LIMITS.cache_salt_chars:
        raise InvalidRequest(
            f"cache_salt is longer than {LIMITS.cache_salt_chars} characters. Shorten it.", param="cache_salt"
        )
    try:
        return (cache_salt or "").encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            "cache_salt holds half a surrogate pair, which no text contains. Send UTF-8.", param="cache_salt"
        ) from None


def _estimate(prompt: Prompt) -> int:
    """Prompt tokens before anything is encoded; set right afterwards."""
    return characters(prompt) // 4 + 1 if isinstance(prompt, (str, Chat)) else len(prompt)
