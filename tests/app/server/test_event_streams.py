"""Event streams as app.server sends them, over sockets: beside other requests, and to clients that do not read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import h11
import pytest

import app.server.hypercorn
from actors.options import Arguments
from app.server.hypercorn import ConnectionLimit, configuration, listen, serve
from tests.kits.waiting import PATIENCE

Until = Callable[[Callable[[], object]], Awaitable[None]]

PIECE = b"data: " + b"x" * 1000 + b"\n\n"
PIECES = 20_000  # 20 MB: more than sockets hold
CHUNKS = b"9\r\ndata: 1\n\n\r\n9\r\ndata: 2\n\n\r\n0\r\n\r\n"


class Streams:
    """Answers ``/short`` with two pieces, ``/long`` with many, ``/broken`` with one and an exception, ``/held`` with
    one and, when it is let go, another."""

    def __init__(self) -> None:
        self.failed = asyncio.Event()  # ends the server
        self.serving: asyncio.Task[bool] | None = None
        self.port = 0
        self.connections = ConnectionLimit()
        self.passed = 0  # pieces of the long stream that the server took
        self.give_up = asyncio.Event()  # the long stream ends in the middle
        self.left = asyncio.Event()  # the long stream has ended
        self.let_go = asyncio.Event()

    async def drain(self, timeout: float | None = None) -> bool:
        return True

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        events = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": events})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        if scope["path"] == "/broken":
            raise RuntimeError("boom")
        if scope["path"] == "/long":
            tasks = [asyncio.create_task(each) for each in (self._write(send), _gone(receive), self.give_up.wait())]
            await asyncio.wait(tasks[1:], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.left.set()
            return
        if scope["path"] == "/held":
            await self.let_go.wait()
        await send({"type": "http.response.body", "body": b"data: 2\n\n", "more_body": False})

    async def _write(self, send: Any) -> None:
        for _ in range(PIECES):
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})
            self.passed += 1
            await asyncio.sleep(0)  # as a real stream, which waits for its next token

    async def stand_still(self) -> None:
        """Return when the long stream's pieces are not taken any more."""
        before = -1
        while self.passed != before or not before:
            before = self.passed
            await asyncio.sleep(0.1)


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@pytest.fixture
async def streams(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Streams]:
    @contextlib.contextmanager
    def no_signals(*_: Any) -> Iterator[None]:
        yield

    application, config = Streams(), configuration(Arguments(port=0))
    config.graceful_timeout = 10 * PATIENCE
    monkeypatch.setattr(app.server.hypercorn, "_signals", no_signals)
    monkeypatch.setattr(app.server.hypercorn, "ConnectionLimit", lambda: application.connections)
    sockets = listen(config)
    application.port = sockets.insecure_sockets[0].getsockname()[1]
    application.serving = asyncio.create_task(serve(application, application, config, sockets))
    try:
        yield application
    finally:
        application.serving.cancel()
        await asyncio.gather(application.serving, return_exceptions=True)


def request(path: str, method: str = "GET", version: str = "1.1") -> bytes:
    return f"{method} {path} HTTP/{version}\r\nHost: localhost\r\n\r\n".encode()


async def test_the_server_sends_pieces_past_h11(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of Hypercorn's names are replaced while it serves: this fails when one of them is no longer looked up."""
    seen: list[object] = []
    send = h11.Connection.send

    def spy(connection: h11.Connection, event: Any) -> bytes | None:
        seen.append(type(event))
        return send(connection, event)

    monkeypatch.setattr(h11.Connection, "send", spy)
    reader, writer = await asyncio.open_connection("127.0.0.1", streams.port)
    async with asyncio.timeout(PATIENCE):
        writer.write(request("/short"))
        assert (await reader.readuntil(b"\r\n0\r\n\r\n")).endswith(CHUNKS)
    assert seen == [h11.Response, h11.Data, h11.EndOfMessage]  # the last piece ends the message
    writer.close()


async def test_requests_behind_each_other_get_each_their_answer(streams: Streams) -> None:
    """Pipelined, a HEAD among them; the last one speaks HTTP/1.0: no chunks, and the connection's end is its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", streams.port)
    writer.write(request("/short") + request("/short", "HEAD") + request("/short") + request("/short", version="1.0"))
    async with asyncio.timeout(PATIENCE):
        answer = await reader.read()
    bodies = [part.partition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 200 \r\n")[1:]]
    assert bodies == [CHUNKS, b"", CHUNKS, b"data: 1\n\ndata: 2\n\n"]
    writer.close()


async def test_a_stream_that_breaks_is_not_ended(streams: Streams, until: Until) -> None:
    """A client must see that something is missing: no last chunk, and no more requests on this connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", streams.port)
    writer.write(request("/broken") + request("/short"))
    async with asyncio.timeout(PATIENCE):
        answer = await reader.read()
    assert answer.endswith(b"\r\n\r\n9\r\ndata: 1\n\n\r\n")
    await until(lambda: not streams.connections.open)  # with the request behind it never read
    writer.close()


async def test_a_client_that_does_not_read_holds_the_stream_up(streams: Streams, until: Until) -> None:
    """What waits for it is what sockets hold, and its going ends the stream, though it sent more in between."""
    reader, writer = await asyncio.open_connection("127.0.0.1", streams.port, limit=1024)
    async with asyncio.timeout(PATIENCE):
        writer.write(request("/long") + request("/short"))
        await reader.readuntil(b"data: 1\n\n")
        await streams.stand_still()
        assert 0 < streams.passed < PIECES
        writer.transport.abort()
        await streams.left.wait()
    await until(lambda: not streams.connections.open)
    assert streams.passed < PIECES


async def test_a_client_that_does_not_read_loses_its_connection(
    streams: Streams, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.setattr(app.server.hypercorn, "LINGER_TIMEOUT", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", streams.port, limit=1024)
    async with asyncio.timeout(PATIENCE):
        writer.write(request("/long"))
        await reader.readuntil(b"data: 1\n\n")
        await streams.stand_still()
    streams.give_up.set()
    await until(lambda: not streams.connections.open)
    writer.transport.abort()


async def test_a_request_behind_the_last_one_does_not_hold_up_the_end(streams: Streams) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", streams.port)
    assert streams.serving is not None
    async with asyncio.timeout(PATIENCE):  # less than connections get to close
        writer.write(request("/held") + request("/short"))
        await reader.readuntil(b"data: 1\n\n")
        streams.failed.set()
        with contextlib.suppress(ConnectionError):
            while True:
                (await asyncio.open_connection("127.0.0.1", streams.port))[1].close()
        streams.let_go.set()
        assert (await reader.read()).endswith(b"data: 2\n\n\r\n0\r\n\r\n")
        await streams.serving
    writer.close()
