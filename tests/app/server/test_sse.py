"""The body of an event stream, piece by piece."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from actors.boards.stream_buffer import StreamBuffer
from actors.protocol.requests import Delta
from actors.requests.streams import RequestStream
from app.server.dialect import OPENAI
from app.server.sse import SseBody
from telemetry.timeline import Timelines


class Writer:
    def chunk(self, delta: Delta) -> bytes:
        return delta.text.encode()

    def end(self) -> bytes:
        return b"usage;"

    def aborted(self) -> None:
        """No word for it."""


async def test_the_end_travels_with_the_last_piece() -> None:
    async def admit(buffer: StreamBuffer) -> list[int]:
        return [1]

    buffer = StreamBuffer(Timelines().open("r", operation="chat", model="m"), 2)
    stream = RequestStream(buffer, label=None, deadline=None, admit=admit, release=lambda buffer: None)
    nothing: Any = None
    exchange: Any = SimpleNamespace(dialect=OPENAI, waiting=lambda: None, woken=lambda: None)
    body = SseBody(nothing, exchange, stream, Writer())
    pieces = []
    for delta in (
        Delta(request_id="r", index=0, text="a", token_ids=(1,)),
        Delta(request_id="r", index=1, text="b", token_ids=(2,), finish_reason="stop"),
        Delta(request_id="r", index=0, text="c", token_ids=(3,), finish_reason="length"),
    ):
        buffer.push(delta)
        pieces.append(await body.__anext__())
    assert pieces == [b"a", b"b", b"cusage;data: [DONE]\n\n"]
    assert [piece async for piece in body] == []
