from __future__ import annotations

import asyncio
import gc
import time

import msgspec
import pytest

from actors.boards.stream_buffer import StreamBuffer, merge
from actors.protocol.requests import (
    Delta,
    InvalidRequest,
    RequestAborted,
    RequestFailed,
    RequestTimeout,
    TokenLogprob,
    Usage,
)
from actors.requests.streams import RequestStream
from telemetry.timeline import Timelines
from tests.kits.waiting import until


def delta(text: str, *, index: int = 0, finish: str | None = None, first: bool = False) -> Delta:
    return Delta(
        request_id="r",
        index=index,
        text=text,
        token_ids=tuple(range(len(text))),
        finish_reason=finish,  # type: ignore[arg-type]
        prompt_token_ids=(1, 2) if first else None,
        usage=Usage(prompt_tokens=2, completion_tokens=len(text)),
    )


class House:
    def __init__(self, error: Exception | None = None) -> None:
        self.released: list[StreamBuffer] = []
        self.error = error

    async def admit(self, buffer: StreamBuffer) -> list[int]:
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return [*range(20)]

    def stream(
        self, *, choices: int = 1, interval: int = 1, deadline: float | None = None
    ) -> tuple[StreamBuffer, RequestStream]:
        buffer = StreamBuffer(Timelines().open("r", operation="chat", model="m"), choices, interval=interval)
        return buffer, RequestStream(
            buffer, label=None, deadline=deadline, admit=self.admit, release=self.released.append
        )


async def test_choices_are_shown_when_the_first_has_scored_the_prompt() -> None:
    scores = (TokenLogprob(token_id=1, token="", bytes_=b"", logprob=None),)
    timeline = Timelines().open("r", operation="chat", model="m")
    buffer = StreamBuffer(timeline, 3, shares_prompt_logprobs=True)
    buffer.push(delta("ab", index=1, first=True))
    buffer.push(delta("cd", index=1, finish="stop"))
    assert buffer.take() is None
    buffer.push(msgspec.structs.replace(delta("e", index=0, first=True), prompt_logprobs=scores))
    buffer.push(delta("f", index=2, first=True))
    shown = [buffer.take() for _ in range(3)]
    assert sorted((d.index, d.text) for d in shown if d is not None) == [(0, "e"), (1, "abcd"), (2, "f")]
    assert all(d is not None and d.prompt_logprobs == scores for d in shown)


async def test_deltas_that_wait_are_merged_and_the_end_releases_once() -> None:
    house = House()
    buffer, stream = house.stream()
    await stream.ready()
    assert (stream.prompt_tokens, stream.prompt_end) == (20, tuple(range(4, 20)))
    for piece in (delta("ab", first=True), delta("cd"), delta("e", finish="stop")):
        buffer.push(piece)
    found = [d async for d in stream]
    assert [d.text for d in found] == ["abcde"]
    assert found[0].finish_reason == "stop"
    assert found[0].prompt_token_ids == (1, 2)
    await stream.aclose()
    assert house.released == [buffer]


async def test_a_merged_delta_has_all_that_its_parts_had() -> None:
    def scores(*ids: int) -> tuple[TokenLogprob, ...]:
        return tuple(TokenLogprob(token_id=i, token=str(i), bytes_=b"x", logprob=-float(i)) for i in ids)

    parts = [
        msgspec.structs.replace(delta("ab", index=3, first=True), logprobs=scores(0, 1), prompt_logprobs=scores(7)),
        delta("", index=3),
        msgspec.structs.replace(delta("c", index=3, finish="stop"), logprobs=scores(2), matched_stop="end"),
    ]
    assert merge(parts) == Delta(
        request_id="r",
        index=3,
        text="abc",
        token_ids=(0, 1, 0),
        logprobs=scores(0, 1, 2),
        prompt_logprobs=scores(7),
        prompt_token_ids=(1, 2),
        finish_reason="stop",
        matched_stop="end",
        usage=parts[-1].usage,
    )
    assert merge([delta("a"), delta("b")]).logprobs is None


async def test_choices_are_kept_apart_and_the_stream_ends_with_the_last() -> None:
    buffer, stream = House().stream(choices=2)
    await stream.ready()
    buffer.push(delta("a", index=0))
    buffer.push(delta("x", index=1))
    buffer.push(delta("b", index=0, finish="stop"))
    buffer.push(delta("y", index=1, finish="length"))
    found = {d.index: d.text async for d in stream}
    assert found == {0: "ab", 1: "xy"}


async def test_interval_shows_the_first_token_then_groups_then_the_end() -> None:
    buffer, stream = House().stream(interval=3)
    await stream.ready()
    shown = []

    async def read() -> None:
        async for d in stream:
            shown.append(d.text)

    reader = asyncio.create_task(read())
    for piece in (delta("a", first=True), delta("b"), delta("c"), delta("d"), delta("e"), delta("f", finish="stop")):
        buffer.push(piece)
        await asyncio.sleep(0.001)
    await reader
    assert shown == ["a", "bcd", "ef"]


async def test_an_error_comes_after_what_was_already_there() -> None:
    house = House()
    buffer, stream = house.stream()
    await stream.ready()
    buffer.push(delta("ab"))
    buffer.fail(RequestFailed("broken"))
    assert (await anext(stream)).text == "ab"
    with pytest.raises(RequestFailed, match="broken"):
        await anext(stream)
    assert house.released == [buffer]


async def test_a_refused_admission_releases_and_notifies_every_waiter() -> None:
    house = House(InvalidRequest("too long", param="prompt"))
    buffer, stream = house.stream()
    results = await asyncio.gather(stream.ready(), stream.ready(), return_exceptions=True)
    assert all(isinstance(r, InvalidRequest) for r in results)
    assert house.released == [buffer]


async def test_a_deadline_ends_a_stream_that_waits() -> None:
    house = House()
    buffer, stream = house.stream(deadline=time.monotonic() + 0.02)
    with pytest.raises(RequestTimeout):
        await anext(stream)
    assert house.released == [buffer]


async def test_cancelling_a_reader_leaves_the_stream_usable() -> None:
    buffer, stream = House().stream()
    reader = asyncio.ensure_future(anext(stream))
    await until(lambda: buffer._waiter)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    buffer.push(delta("a", finish="stop"))
    assert (await anext(stream)).text == "a"


async def test_a_stream_that_is_dropped_is_released() -> None:
    house = House()
    buffer, stream = house.stream()
    await stream.ready()
    del stream
    gc.collect()
    await asyncio.sleep(0)
    assert house.released == [buffer]


async def test_an_error_after_the_last_token_is_no_second_end() -> None:
    house = House()
    buffer, stream = house.stream()
    await stream.ready()
    buffer.push(delta("ab", finish="stop"))
    buffer.fail(RequestFailed("the engine was stopped"))  # before anybody has read
    assert [d.text async for d in stream] == ["ab"]
    assert house.released == [buffer]


async def test_the_last_delta_gives_the_place_back() -> None:
    house = House()
    buffer, stream = house.stream()
    await stream.ready()
    buffer.push(delta("ab", finish="stop"))
    assert (await anext(stream)).finish_reason == "stop"
    assert house.released == [buffer]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_closing_wakes_a_reader_in_another_task() -> None:
    house = House()
    buffer, stream = house.stream()
    reader = asyncio.ensure_future(anext(stream, None))
    await until(lambda: buffer._waiter)
    await stream.aclose()
    assert await asyncio.wait_for(reader, 60) is None
    assert house.released == [buffer]


async def test_two_readers_at_once_are_refused_and_the_first_reads_on() -> None:
    buffer, stream = House().stream()
    reader = asyncio.ensure_future(anext(stream))
    await until(lambda: buffer._waiter)
    with pytest.raises(RuntimeError, match="another task"):
        await asyncio.wait_for(anext(stream), 60)
    buffer.push(delta("a", finish="stop"))
    assert (await asyncio.wait_for(reader, 60)).text == "a"


async def test_a_cancelled_admission_cancels_no_other() -> None:
    house = House()
    buffer, stream = house.stream()
    never = asyncio.Event()
    stream._admit = lambda _: never.wait()  # type: ignore[assignment, return-value]
    first = asyncio.ensure_future(stream.ready())
    await asyncio.sleep(0)
    others = [asyncio.ensure_future(stream.ready()), asyncio.ensure_future(anext(stream))]
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    for other in others:
        with pytest.raises(RequestAborted):
            await other
    with pytest.raises(RequestAborted):
        await stream.ready()
    assert house.released == [buffer]


async def test_a_reader_that_never_reads_costs_each_token_the_same() -> None:
    counted = 0

    class Counted(tuple[int, ...]):
        def __len__(self) -> int:
            nonlocal counted
            counted += 1
            return 1

    buffer = StreamBuffer(Timelines().open("r", operation="chat", model="m"), 1, interval=64)
    for _ in range(1000):
        buffer.push(Delta(request_id="r", token_ids=Counted((1,)), usage=Usage()))
    assert counted <= 6000
