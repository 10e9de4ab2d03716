"""The neutral events of one choice."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from actors.protocol.requests import Delta, RequestAborted, Usage
from app.apis.choice_reader import ChoiceReader
from app.apis.collecting import CollectedChoice
from app.apis.events import (
    Call,
    CallArguments,
    CallBegun,
    CallEnded,
    ChoiceEnded,
    ChoiceEvents,
    Failed,
    Reasoning,
    Text,
    events_of,
    join,
    read_whole,
)
from app.parsers.reasoning.formats import REASONING_FORMATS
from app.parsers.tools.hermes import HermesParser
from app.server.errors import to_api_error

TEXT = '<think>Hm</think>Look: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>So.'


def reader() -> ChoiceReader:
    return ChoiceReader(HermesParser({"add": {}}, reasoning_format=REASONING_FORMATS["base"]), 9)


def deltas(size: int, reason: str = "stop") -> list[Delta]:
    pieces = [TEXT[at : at + size] for at in range(0, len(TEXT), size)]
    return [
        Delta(
            request_id="r",
            text=piece,
            token_ids=(9 if "Hm</think>" in TEXT[: (at + 1) * size] and "</think>" not in TEXT[: at * size] else at,),
            finish_reason=reason if at == len(pieces) - 1 else None,
            matched_stop="!" if at == len(pieces) - 1 else None,
            usage=Usage(3, at + 1),
        )
        for at, piece in enumerate(pieces)
    ]


async def stream(size: int, error: Exception | None = None) -> AsyncIterator[Delta]:
    for delta in deltas(size):
        if error is not None and delta.finish_reason is not None:
            raise error
        yield delta


def failure(error: Exception) -> object:
    return to_api_error(error, "r")


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_events_keep_the_order_of_the_answer(size: int) -> None:
    events = [event async for event in events_of(stream(size), reader(), failure)]
    begun = next(event for event in events if isinstance(event, CallBegun))
    assert join(events) == [Reasoning("Hm"), Text("Look: "), Call(begun.id, "add", '{"a": 1}'), Text("So.")]
    at = events.index(CallEnded(0))
    assert isinstance(events[at - 1], CallArguments)
    assert isinstance(events[at + 1], Text)
    end = events[-1]
    assert isinstance(end, ChoiceEnded)
    assert (end.reason, end.matched_stop) == ("tool_calls", "!")
    assert end.usage.completion_tokens == len(deltas(size))


async def test_an_error_is_the_last_event() -> None:
    events = [event async for event in events_of(stream(7, RequestAborted("gone")), reader(), failure)]
    assert isinstance(events[-1], Failed)
    assert events[-1].error.code == "request_aborted"
    assert events[0] == Reasoning("Hm")


def test_a_cut_answer_ends_its_call() -> None:
    choice = ChoiceEvents(reader())
    cut = Delta(request_id="r", text=TEXT[: TEXT.index("1}}")], finish_reason="length", usage=Usage(3, 5))
    *_, arguments, ended, end = choice.read(cut)
    assert arguments == CallArguments(0, '{"a": ')
    assert ended == CallEnded(0)
    assert end == ChoiceEnded("length", None, Usage(3, 5), 0)


async def test_a_whole_answer_is_its_events_joined() -> None:
    collected = CollectedChoice()
    for delta in deltas(7):
        collected.add(delta)
    answer = await read_whole(collected, reader())
    assert (answer.reasoning, answer.text, [call.arguments for call in answer.calls]) == (
        "Hm",
        "Look: So.",
        ['{"a": 1}'],
    )
    assert answer.end.reason == "tool_calls"
    assert answer.end.usage == collected.usage
    plain = await read_whole(collected, None)
    assert (plain.parts, plain.end.reason) == ([Text(TEXT)], "stop")
