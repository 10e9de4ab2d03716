"""SGLang's native API: ``POST|PUT /generate``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from quart import Response

from actors.protocol.requests import Acceptance, Delta, TokenLogprob
from app.apis.collecting import CollectedChoice, collect
from app.apis.routing import replica_of
from app.apis.sessions import MAX_SECONDS, begin_session_request
from app.apis.sglang.requests import Batch, GenerateRequest, Item, batch_of, native_names
from app.apis.token_values import all_states, packed_experts
from app.server.errors import invalid
from app.server.exchange import Exchange
from app.server.merged_streams import MergedStreams
from app.server.service import Service, json_response
from app.server.sse import sse_response

__all__ = ["CloseSession", "GenerateAnswer", "OpenSession", "close_session", "generate", "open_session"]

_encode = msgspec.json.encode

_REPEATED_FREELY = 2048
"""Characters up to which every event repeats the whole choice."""

_GROWTH = 1 / 16
"""A longer answer is repeated after it has grown by this part of its size."""

_ENTRY_SIZE = 24
"""Characters of a log-probability with its token."""


class GenerateAnswer(msgspec.Struct, kw_only=True):
    """One choice. ``meta_info``: how it ended, its token counts and, if requested, log-probabilities; hidden states
    and experts when it has ended."""

    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]
    index: int | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


async def generate(service: Service, exchange: Exchange, body: GenerateRequest) -> Response:
    """Generate for one prompt or many, as a whole or as a stream. An aborted request returns the output so far."""
    batch = batch_of(body)
    names = native_names(body)
    service.check_size(len(batch.items), batch.choices, names["prompt"])
    session_request = None
    if body.session_params is not None:
        item, prompts = batch.items[0], [item.prompt for item in batch.items]
        rid = item.label or exchange.request_id
        session_request = await begin_session_request(
            service, exchange, body.session_params, prompts, choices=batch.choices, rid=rid, names=names
        )
        item.prompt = session_request.prompt
    salt = f"{body.cache_salt}\n{body.extra_key}" if body.cache_salt and body.extra_key else None
    adapters = [item.adapter and service.adapter_of(item.adapter, "lora_path") for item in batch.items]
    streams = [
        service.submit(
            exchange,
            item.prompt,
            item.params,
            priority=body.priority,
            cache_salt=salt or body.cache_salt or body.extra_key,
            label=item.label,
            rename=names,
            adapter=adapter,
            replica=replica_of(body),
        )
        for item, adapter in zip(batch.items, adapters, strict=True)
    ]
    await service.accepted(streams, names)
    for item, stream in zip(batch.items, streams, strict=True):
        if item.start is not None and item.start >= stream.prompt_tokens:
            raise invalid(
                f"logprob_start_len: {item.start} is not within the prompt of {stream.prompt_tokens} tokens. Lower it."
                " -1 is for no scores of the prompt.",
                param="logprob_start_len",
            )
        if (body.routed_experts_start_len or 0) > stream.prompt_tokens:
            raise invalid(
                f"routed_experts_start_len: {body.routed_experts_start_len} is after the prompt of "
                f"{stream.prompt_tokens} tokens. Lower it.",
                param="routed_experts_start_len",
            )
    answers = _Answers(service, exchange, body, batch, [stream.request_id for stream in streams])
    if body.stream:
        source: AsyncIterator[Delta] = streams[0] if len(streams) == 1 else MergedStreams(streams, batch.choices)
        source = source if session_request is None else session_request.follow(source)
        return sse_response(service, exchange, source, _NativeChunks(answers, service.arguments.stream_output))
    sources = streams if session_request is None else [session_request.follow(streams[0])]
    collected = [choice for source in sources for choice in await collect(source, batch.choices, keep_aborted=True)]
    if exchange.interruption is not None:
        raise exchange.interruption
    answer = [answers.of(index, choice, choice.text) for index, choice in enumerate(collected)]
    answers.note_tokens(collected)
    return json_response(answer[0] if batch.single and batch.choices == 1 else answer)


class OpenSession(msgspec.Struct, kw_only=True):
    """``timeout``: seconds without a request after which the session is closed; 3600 without it."""

    capacity_of_str_len: (
        Annotated[int, Meta(ge=0, lt=2**53, description="Without effect here: the model's context bounds a session.")]
        | None
    ) = None
    session_id: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    streaming: bool | None = None
    timeout: Annotated[float, Meta(gt=0, le=MAX_SECONDS)] | None = None


class CloseSession(msgspec.Struct, kw_only=True):
    session_id: Annotated[str, Meta(max_length=512)]


async def open_session(service: Service, exchange: Exchange, body: OpenSession) -> Response:
    """Open a session; the answer is its id."""
    name = service.sessions.open(
        service.owner(exchange), body.session_id, streaming=bool(body.streaming), seconds=body.timeout
    )
    return json_response(name)


async def close_session(service: Service, exchange: Exchange, body: CloseSession) -> Response:
    """Close a session. A request of it that is running ends as it would."""
    service.sessions.close(service.owner(exchange), body.session_id)
    return Response(status=200)


class _Answers:
    """The answers of choices, while they are generated and at their end."""

    def __init__(
        self, service: Service, exchange: Exchange, body: GenerateRequest, batch: Batch, ids: Sequence[str]
    ) -> None:
        self.batch = batch
        self.count = len(batch.items) * batch.choices
        self._exchange = exchange
        self._ids = ids
        self._with_text = bool(body.return_text_in_logprobs)
        self._first_expert = body.routed_experts_start_len or 0
        self._with_prompt = bool(body.return_prompt_token_ids)
        self._weight_version = service.arguments.weight_version
        self._encoded: tuple[object, tuple[msgspec.Raw, msgspec.Raw]] | None = None  # of the last prompt

    def of(self, index: int, choice: CollectedChoice, text: Sequence[str], since: int = 0) -> GenerateAnswer:
        """``since``: the first output token to report (for disjoint events)."""
        item = self.batch.items[index // self.batch.choices]
        answer = GenerateAnswer(
            text="".join(text), output_ids=choice.token_ids[since:], meta_info=self._meta(item, index, choice, since)
        )
        if self._with_prompt and choice.prompt_token_ids is not None:
            answer.prompt_token_ids = list(choice.prompt_token_ids)
        return answer

    def _meta(self, item: Item, index: int, choice: CollectedChoice, since: int) -> dict[str, Any]:
        number = index // self.batch.choices
        meta: dict[str, Any] = {
            "id": item.label or self._ids[number],
            "request_id": self._ids[number],
            "finish_reason": self._finish(choice),
            "prompt_tokens": choice.usage.prompt_tokens,
            "weight_version": self._weight_version,
            "completion_tokens": choice.usage.completion_tokens,
            "cached_tokens": choice.usage.cached_tokens,
            "e2e_latency": time.monotonic() - self._exchange.started,
        }
        if choice.usage.acceptance is not None:
            meta |= _acceptance(choice.usage.acceptance)
        if item.params.hidden_states and choice.finish_reason is not None:
            meta["hidden_states"] = all_states(choice)
        if item.params.routed_experts and choice.finish_reason is not None:
            meta["routed_experts"] = packed_experts(choice, self._first_expert)
        if item.logprobs:
            prompt = () if item.start is None else (choice.prompt_logprobs or ())[item.start :]
            scored = choice.logprobs[since:]
            if choice.prompt_token_ids is not None:  # otherwise an earlier event had the prompt
                if self._encoded is None or self._encoded[0] is not choice.prompt_logprobs:
                    self._encoded = (choice.prompt_logprobs, self._of_prompt(prompt))
                meta["input_token_logprobs"], tops = self._encoded[1]
                if item.params.logprobs:
                    meta["input_top_logprobs"] = tops
            meta["output_token_logprobs"] = [self._entry(entry, entry.logprob) for entry in scored]
            if item.params.logprobs:
                meta["output_top_logprobs"] = [self._top(entry) for entry in scored]
        return meta

    def _of_prompt(self, prompt: Sequence[TokenLogprob]) -> tuple[msgspec.Raw, msgspec.Raw]:
        """A prompt's log-probabilities and alternatives as JSON, shared by all its choices."""
        own = [self._entry(entry, None if place == 0 else entry.logprob) for place, entry in enumerate(prompt)]
        tops = [None if place == 0 else self._top(entry) for place, entry in enumerate(prompt)]
        return msgspec.Raw(_encode(own)), msgspec.Raw(_encode(tops))

    def _finish(self, choice: CollectedChoice) -> dict[str, Any] | None:
        match choice.finish_reason:
            case None:
                return None
            case "stop":
                return {"type": "stop", "matched": choice.matched_stop}
            case "length":
                return {"type": "length", "length": choice.usage.completion_tokens}
            case "abort":
                why = self._exchange.interruption
                return {"type": "abort", "message": why.message if why is not None else "The request was aborted."}

    def _entry(self, entry: TokenLogprob, logprob: float | None) -> tuple[float | None, int, str | None]:
        return (logprob, entry.token_id, entry.token if self._with_text else None)

    def _top(self, entry: TokenLogprob) -> list[tuple[float | None, int, str | None]]:
        return [self._entry(other, other.logprob) for other in entry.top]

    def note_tokens(self, collected: Sequence[CollectedChoice]) -> None:
        prompts = sum(choice.usage.prompt_tokens for choice in collected[:: self.batch.choices])
        self._exchange.tokens = (prompts, sum(choice.usage.completion_tokens for choice in collected))


def _acceptance(found: Acceptance) -> dict[str, Any]:
    """The names are SGLang's. A length includes the token that is sampled in any case."""
    return {
        "spec_verify_ct": found.steps,
        "spec_accept_length": 1 + found.accepted / found.steps,
        "spec_accept_rate": found.accepted / found.drafted,
        "spec_accept_token_num": found.accepted,
        "spec_draft_token_num": found.drafted,
        "spec_accept_histogram": list(found.histogram),
    }


class _NativeChunks:
    """Each event has all of its choice so far, or with ``disjoint`` only the new part. Data of the prompt come once,
    with the first event of a choice.

    A repeating event is held back until its choice has grown by :data:`_GROWTH`. So a stream is at most some 17 times
    as long as its last events, for any length of the answer.
    """

    def __init__(self, answers: _Answers, disjoint: bool) -> None:
        self._answers = answers
        self._disjoint = disjoint
        self._choices = [CollectedChoice() for _ in range(answers.count)]
        self._sent = [_Sent() for _ in range(answers.count)]

    def chunk(self, delta: Delta) -> bytes:
        choice, sent = self._choices[delta.index], self._sent[delta.index]
        choice.add(delta)
        sent.fresh += len(delta.text) + len(delta.token_ids)
        for entry in delta.logprobs or ():
            sent.fresh += _ENTRY_SIZE * (1 + len(entry.top))
        if delta.finish_reason is None and not self._disjoint and not sent.due:
            return b""
        return self._event(delta.index)

    def _event(self, index: int) -> bytes:
        choice, sent = self._choices[index], self._sent[index]
        answer = self._answers.of(index, choice, choice.text, sent.tokens if self._disjoint else 0)
        if self._answers.count > 1:
            answer.index = index
        if self._disjoint:
            choice.text.clear()
        if choice.prompt_token_ids is not None:
            choice.prompt_token_ids = choice.prompt_logprobs = None
        sent.done(len(choice.token_ids))
        return b"data: " + _encode(answer) + b"\n\n"

    def end(self) -> bytes:
        self._answers.note_tokens(self._choices)
        return b""

    def aborted(self) -> bytes:
        """The last events of all choices that have not ended."""
        events = []
        for index, choice in enumerate(self._choices):
            if choice.finish_reason is None:
                choice.finish_reason = "abort"
                events.append(self._event(index))
        self.end()
        return b"".join(events)


class _Sent:
    """How much of a choice its events have sent, in approximate characters of the answer."""

    __slots__ = ("fresh", "size", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.size = 0
        self.fresh = 0  # not in any event yet

    @property
    def due(self) -> bool:
        """Whether a repeating event is due."""
        return self.size < _REPEATED_FREELY or self.fresh >= _GROWTH * self.size

    def done(self, tokens: int) -> None:
        """Mark everything as sent."""
        self.tokens = tokens
        self.size += self.fresh
        self.fresh = 0
