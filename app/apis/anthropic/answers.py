"""Answers of Anthropic's API, whole and as events."""

from __future__ import annotations

import base64
import hashlib
from typing import Any, Literal

import msgspec

from actors.protocol.requests import Delta, Usage
from app.apis.choice_reader import ChoiceReader
from app.apis.events import (
    Answer,
    Call,
    CallArguments,
    CallBegun,
    ChoiceEnded,
    ChoiceEvents,
    Event,
    Reasoning,
    Text,
    input_of,
)
from app.server.exchange import Exchange

__all__ = ["MessageAnswer", "MessageChunks", "UsageReport", "message_of", "usage_of"]

_encode = msgspec.json.encode
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class OutputTokensDetails(msgspec.Struct):
    thinking_tokens: int


class UsageReport(msgspec.Struct, kw_only=True):
    """The prompt has ``input_tokens`` and ``cache_read_input_tokens``, which were not computed again."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    service_tier: Literal["standard"] = "standard"


class MessageAnswer(msgspec.Struct, kw_only=True):
    """``content``: blocks of thinking, text and tool_use, in the order of the answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: StopReason | None
    stop_sequence: str | None
    stop_details: None = None
    container: None = None
    usage: UsageReport


def usage_of(usage: Usage, reasoning_tokens: int) -> UsageReport:
    return UsageReport(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens),
    )


def _stop(end: ChoiceEnded, max_tokens: int) -> tuple[StopReason, str | None]:
    """The reason, and the stop sequence if that is it."""
    if end.reason == "tool_calls":
        return "tool_use", None
    if end.reason == "length":
        cut = end.usage.completion_tokens < max_tokens
        return ("model_context_window_exceeded" if cut else "max_tokens"), None
    if isinstance(end.matched_stop, str):
        return "stop_sequence", end.matched_stop
    return "end_turn", None


def _signature(thought: str) -> str:
    """What clients send back with a thought. Nothing here depends on it: thoughts are taken as they come."""
    return base64.b64encode(hashlib.blake2s(thought.encode(), digest_size=24).digest()).decode()


def message_of(answer: Answer, *, identity: str, model: str, max_tokens: int, shows_thought: bool) -> MessageAnswer:
    """A whole answer. ``shows_thought``: whether the thought has its text."""
    content: list[dict[str, Any]] = []
    for part in answer.parts:
        if isinstance(part, Call):
            content.append({"type": "tool_use", "id": part.id, "name": part.name, "input": input_of(part.arguments)})
        elif isinstance(part, Reasoning):
            shown = part.text if shows_thought else ""
            content.append({"type": "thinking", "thinking": shown, "signature": _signature(part.text)})
        elif part.text.strip():  # blocks of white space are refused by Anthropic when they are sent back
            content.append({"type": "text", "text": part.text})
    reason, sequence = _stop(answer.end, max_tokens)
    return MessageAnswer(
        id=identity,
        model=model,
        content=content,
        stop_reason=reason,
        stop_sequence=sequence,
        usage=usage_of(answer.end.usage, answer.end.reasoning_tokens),
    )


def _event(kind: bytes, data: bytes) -> bytes:
    return b'event: %b\ndata: {"type":"%b",%b}\n\n' % (kind, kind, data)


class MessageChunks:
    """The events of one message: a block at a time, each with its start, deltas and stop."""

    def __init__(
        self,
        exchange: Exchange,
        reader: ChoiceReader | None,
        *,
        model: str,
        max_tokens: int,
        shows_thought: bool,
    ) -> None:
        self._exchange = exchange
        self._choice = ChoiceEvents(reader)
        self._model = model
        self._max_tokens = max_tokens
        self._shows_thought = shows_thought
        self._block = -1  # index of the last block
        self._kind: type[Event] | None = None  # of the open block
        self._space = ""  # at the beginning of a text, until more of it comes
        self._thought: list[str] = []

    def start(self, prompt_tokens: int) -> bytes:
        """The event before all others. What of the prompt was cached is known at the end."""
        message = MessageAnswer(
            id=self._exchange.request_id,
            model=self._model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=usage_of(Usage(prompt_tokens), 0),
        )
        return _event(b"message_start", b'"message":' + _encode(message)) + _PING

    def chunk(self, delta: Delta) -> bytes:
        return b"".join([piece for event in self._choice.read(delta) for piece in self._of(event)])

    def _of(self, event: Event) -> list[bytes]:
        match event:
            case Text(text):
                if self._kind is not Text:
                    text, self._space = self._space + text, ""
                    if not text.strip():
                        self._space = text
                        return []
                begin = self._open(Text, b'"type":"text","text":""')
                return [*begin, self._delta(b'"type":"text_delta","text":' + _encode(text))]
            case Reasoning(text):
                begin = self._open(Reasoning, b'"type":"thinking","thinking":"","signature":""')
                self._thought.append(text)
                if not self._shows_thought:
                    return begin
                return [*begin, self._delta(b'"type":"thinking_delta","thinking":' + _encode(text))]
            case CallBegun(_, identity, name):
                fields = b'"type":"tool_use","id":%b,"name":%b,"input":{}' % (_encode(identity), _encode(name))
                return [*self._close(), *self._open(CallBegun, fields)]
            case CallArguments(_, text):
                return [self._delta(b'"type":"input_json_delta","partial_json":' + _encode(text))]
            case ChoiceEnded():
                return [*self._close(), self._last(event)]
        return []

    def _open(self, kind: type[Event], fields: bytes) -> list[bytes]:
        if self._kind is kind:
            return []
        closed = self._close()
        self._kind, self._space = kind, ""
        self._block += 1
        start = _event(b"content_block_start", b'"index":%d,"content_block":{%b}' % (self._block, fields))
        return [*closed, start]

    def _close(self) -> list[bytes]:
        if self._kind is None:
            return []
        events = []
        if self._kind is Reasoning:
            signature = _signature("".join(self._thought))
            events.append(self._delta(b'"type":"signature_delta","signature":' + _encode(signature)))
            self._thought = []
        self._kind = None
        return [*events, _event(b"content_block_stop", b'"index":%d' % self._block)]

    def _delta(self, fields: bytes) -> bytes:
        return _event(b"content_block_delta", b'"index":%d,"delta":{%b}' % (self._block, fields))

    def _last(self, end: ChoiceEnded) -> bytes:
        reason, sequence = _stop(end, self._max_tokens)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        usage = usage_of(end.usage, end.reasoning_tokens)
        fields = b'"delta":' + _encode(delta) + b',"usage":' + _encode(usage)
        return _event(b"message_delta", fields) + b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

    def end(self) -> bytes:
        usage = self._choice.usage
        self._exchange.tokens = (usage.prompt_tokens, usage.completion_tokens)
        return b""

    def aborted(self) -> None:
        """There is no stop reason for an abort: the stream ends with an error."""
