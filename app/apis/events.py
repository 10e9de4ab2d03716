"""The neutral stream of events of one choice, which every API of conversations writes in its own form.

An answer is read once, in order: thought, content and tool calls as the model makes them, then one end. Whole answers
are the same events, joined.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Literal

import msgspec

from actors.protocol.requests import Delta, FinishReason, Usage
from app.apis.choice_reader import ChoiceReader
from app.apis.collecting import CollectedChoice
from app.parsers.events import CallArguments, CallBegun, Piece, Reasoning, Text
from app.server.errors import ApiError

__all__ = [
    "Answer",
    "Call",
    "CallArguments",
    "CallBegun",
    "CallEnded",
    "ChoiceEnded",
    "ChoiceEvents",
    "EndReason",
    "Event",
    "Failed",
    "Reasoning",
    "Text",
    "events_of",
    "input_of",
    "join",
    "read_whole",
]

EndReason = Literal["stop", "length", "tool_calls"]
"""Why a choice ended: the model or a stop string ended it, a limit cut it, or it ended with calls."""

_PIECE = 4096  # characters of a whole answer that are parsed at once


class CallEnded(msgspec.Struct, gc=False):
    """All arguments of a call have come, or the answer was cut in them."""

    index: int


class ChoiceEnded(msgspec.Struct, gc=False):
    """The last event of a choice. ``matched_stop``: the stop string or token id that ended it. ``reasoning_tokens``:
    those of its completion tokens that are the thought's."""

    reason: EndReason
    matched_stop: str | int | None
    usage: Usage
    reasoning_tokens: int = 0


class Failed(msgspec.Struct):
    """The last event of a choice that met an error; ``error.code`` is ``request_aborted`` after an abort."""

    error: ApiError


Event = Piece | CallEnded | ChoiceEnded | Failed


class ChoiceEvents:
    """Turns the deltas of one choice into its events. ``reader``: reads the model's format; None where all text is
    content.

    ``usage`` and ``reasoning_tokens`` are those so far.
    """

    __slots__ = ("_open", "_reader", "usage")

    def __init__(self, reader: ChoiceReader | None) -> None:
        self._reader = reader
        self._open: int | None = None  # the call that has begun and not ended
        self.usage = Usage()

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._reader is None else self._reader.reasoning_tokens

    def read(self, delta: Delta) -> list[Event]:
        """The events of the next delta: none while the reader waits for more text, and the end with the last delta."""
        self.usage = delta.usage
        events: list[Event] = []
        self._pass(self._pieces(delta), events)
        if delta.finish_reason is not None:
            self._close(events)
            called = self._reader is not None and self._reader.calls
            reason: EndReason = "tool_calls" if called and delta.finish_reason == "stop" else delta.finish_reason
            events.append(ChoiceEnded(reason, delta.matched_stop, delta.usage, self.reasoning_tokens))
        return events

    def _pieces(self, delta: Delta) -> Iterable[Piece]:
        reader = self._reader
        if reader is None:
            return (Text(delta.text),) if delta.text else ()
        pieces = reader.read(delta.text, delta.token_ids)
        return pieces if delta.finish_reason is None else [*pieces, *reader.end()]

    def _pass(self, pieces: Iterable[Piece], events: list[Event]) -> None:
        for piece in pieces:
            if self._open is not None and not isinstance(piece, CallArguments):
                self._close(events)
            if isinstance(piece, CallBegun):
                self._open = piece.index
            events.append(piece)

    def _close(self, events: list[Event]) -> None:
        if self._open is not None:
            events.append(CallEnded(self._open))
            self._open = None


async def events_of(
    stream: AsyncIterator[Delta], reader: ChoiceReader | None, failure: Callable[[Exception], ApiError]
) -> AsyncIterator[Event]:
    """The events of a stream with one choice. An error of the engine becomes the last event, by ``failure`` (such as
    ``Service.failure`` with its exchange)."""
    choice = ChoiceEvents(reader)
    try:
        async for delta in stream:
            for event in choice.read(delta):
                yield event
    except Exception as error:
        yield Failed(failure(error))


class Call(msgspec.Struct):
    """A whole tool call; ``arguments`` is JSON as the model wrote it."""

    id: str
    name: str
    arguments: str


class Answer(msgspec.Struct):
    """A whole choice. ``parts``: thought, content and calls in their order, each joined."""

    parts: list[Text | Reasoning | Call]
    end: ChoiceEnded

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Reasoning))

    @property
    def calls(self) -> list[Call]:
        return [part for part in self.parts if isinstance(part, Call)]


def input_of(arguments: str) -> object:
    """A call's arguments as the object that they are, as they were written. Those that ``max_tokens`` has cut, or that
    no decoder reads, are ``{"INVALID_JSON": TEXT}``, as Anthropic's guide has it."""
    try:
        msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {"INVALID_JSON": arguments}
    return msgspec.Raw(arguments.encode())


def join(events: Iterable[Event]) -> list[Text | Reasoning | Call]:
    """Neighbouring pieces as one."""
    pieces: list[tuple[Text | Reasoning | Call, list[str]]] = []
    for event in events:
        match event:
            case Text() | Reasoning():
                if not pieces or type(pieces[-1][0]) is not type(event):
                    pieces.append((type(event)(""), []))
                pieces[-1][1].append(event.text)
            case CallBegun():
                pieces.append((Call(event.id, event.name, ""), []))
            case CallArguments():
                pieces[-1][1].append(event.text)
    parts: list[Text | Reasoning | Call] = []
    for part, texts in pieces:
        if isinstance(part, Call):
            part.arguments = "".join(texts)
        else:
            part.text = "".join(texts)
        parts.append(part)
    return parts


async def read_whole(collected: CollectedChoice, reader: ChoiceReader | None) -> Answer:
    """The events of a choice whose deltas were collected, joined. The loop runs between pieces: a long answer takes
    seconds, in which other streams go on."""
    choice = ChoiceEvents(reader)
    text, events = "".join(collected.text), []
    starts = range(0, len(text), _PIECE) if reader is not None else range(0)
    token_ids = tuple(collected.token_ids)
    for start in starts:
        piece = Delta(request_id="", text=text[start : start + _PIECE], token_ids=token_ids)
        events += choice.read(piece)
        token_ids = ()
        await asyncio.sleep(0)
    finish: FinishReason = "length" if collected.finish_reason == "length" else "stop"
    last = Delta(
        request_id="",
        text=text if reader is None else "",
        token_ids=token_ids,
        finish_reason=finish,
        matched_stop=collected.matched_stop,
        usage=collected.usage,
    )
    events += choice.read(last)
    end = events.pop()
    assert isinstance(end, ChoiceEnded)
    return Answer(join(events), end)
