"""Event streams over HTTP/1.1: the bytes are h11's, and a piece costs h11 nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import h11
import pytest
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Event, RawData
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.utils import UnexpectedMessageError

from app.server.http1 import Chunk, Http1

EVENTS = b"text/event-stream; charset=utf-8"
PIECES = [b"data: {}\n\n", b"x" * 70000, b": keep-alive\n\n"]


class Wire:
    """A connection without a network: what the protocol sends, and each request's way to answer."""

    def __init__(self, kind: type[H11Protocol]) -> None:
        self.sent: list[bytes] = []
        self.answers: list[Callable[[Any], Awaitable[None]]] = []
        config = Config()
        config.include_date_header = False
        group: Any = SimpleNamespace(spawn_app=self._spawn_app)
        app: Any = None
        state: Any = {}
        self.protocol = kind(app, config, WorkerContext(None), group, state, False, None, None, self._send)

    async def _send(self, event: Event | Chunk) -> None:
        if isinstance(event, (Chunk, RawData)):
            self.sent.append(event.data)

    async def _spawn_app(self, app: Any, config: Config, scope: Any, send: Callable[[Any], Awaitable[None]]) -> Any:
        async def put(message: Any) -> None:
            """The application does not listen."""

        self.answers.append(send)
        return put


async def answered(
    kind: type[H11Protocol],
    request: bytes,
    headers: list[tuple[bytes, bytes]],
    pieces: list[bytes],
    *,
    status: int = 200,
) -> bytes:
    """All that a protocol sends for a request whose application answers with these pieces."""
    wire = Wire(kind)
    await wire.protocol.handle(RawData(request))
    (tell,) = wire.answers
    await tell({"type": "http.response.start", "status": status, "headers": headers})
    for piece in pieces:
        await tell({"type": "http.response.body", "body": piece, "more_body": True})
    await tell({"type": "http.response.body", "body": b"", "more_body": False})
    return b"".join(wire.sent)


@pytest.mark.parametrize(
    ("request_line", "headers"),
    [
        (b"POST / HTTP/1.1", [(b"Content-Type", EVENTS)]),
        (b"POST / HTTP/1.0", [(b"content-type", EVENTS)]),
        (b"HEAD / HTTP/1.1", [(b"content-type", EVENTS)]),
        (b"POST / HTTP/1.1", [(b"content-type", EVENTS), (b"content-length", b"%d" % sum(map(len, PIECES)))]),
        (b"POST / HTTP/1.1", [(b"content-type", b"application/json")]),
    ],
)
async def test_the_bytes_are_those_of_h11(request_line: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    request = request_line + b"\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    expected = await answered(H11Protocol, request, headers, PIECES)
    assert await answered(Http1, request, headers, PIECES) == expected
    assert expected


@pytest.mark.parametrize("status", [204, 304])
async def test_a_status_without_a_body_has_none(status: int) -> None:
    request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    answer = await answered(Http1, request, [(b"content-type", EVENTS)], PIECES, status=status)
    assert answer.endswith(b"\r\n\r\n")
    assert answer.count(b"\r\n\r\n") == 1


async def test_a_stream_that_is_over_writes_nothing_into_the_next() -> None:
    wire = Wire(Http1)
    request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", EVENTS)]}
    await wire.protocol.handle(RawData(request))
    await wire.answers[0](start)
    await wire.answers[0]({"type": "http.response.body", "body": b"", "more_body": False})
    await wire.protocol.handle(RawData(request))
    await wire.answers[1](start)
    before = list(wire.sent)
    with pytest.raises(UnexpectedMessageError):
        await wire.answers[0]({"type": "http.response.body", "body": b": late\n\n", "more_body": True})
    assert wire.sent == before
    await wire.answers[1]({"type": "http.response.body", "body": b": here\n\n", "more_body": True})
    assert wire.sent[len(before) :] == [b"8\r\n: here\n\n\r\n"]


async def test_a_piece_of_an_event_stream_is_none_of_h11s_business(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    send = h11.Connection.send

    def spy(connection: h11.Connection, event: Any) -> bytes | None:
        seen.append(event)
        return send(connection, event)

    monkeypatch.setattr(h11.Connection, "send", spy)
    request = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    await answered(Http1, request, [(b"content-type", EVENTS)], PIECES)
    assert not any(isinstance(event, h11.Data) for event in seen)
    await answered(Http1, request, [(b"content-type", b"text/plain")], PIECES)
    assert sum(isinstance(event, h11.Data) for event in seen) == len(PIECES)
