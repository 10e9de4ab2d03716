"""Streams over HTTP/2: pieces are framed and written together, and wait for the client's windows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData

from app.server.http2 import BURST, Http2

Answer = Callable[[Any], Awaitable[None]]
OPEN = [(":method", "GET"), (":path", "/"), (":scheme", "http"), (":authority", "x")]


class Wire:
    """A connection without a network, and the client at its other end. ``writes``: what the protocol writes."""

    def __init__(self, window: int = 65_535) -> None:
        self.writes: list[bytes] = []
        self.answers: list[Answer] = []
        self.tasks: list[asyncio.Task[None]] = []
        group: Any = SimpleNamespace(spawn_app=self._spawn_app, spawn=self._spawn)
        app: Any = None
        state: Any = {}
        self.protocol = Http2(app, Config(), WorkerContext(None), group, state, False, None, None, self._send)
        self.client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        windows = {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}
        self.client.local_settings = h2.settings.Settings(client=True, initial_values=windows)
        self.client.initiate_connection()

    async def _send(self, event: Event) -> None:
        if isinstance(event, RawData):
            self.writes.append(event.data)

    def _spawn(self, function: Callable[[], Any]) -> None:
        self.tasks.append(asyncio.create_task(function()))

    async def _spawn_app(self, app: Any, config: Config, scope: Any, send: Answer) -> Any:
        async def put(message: Any) -> None:
            """The application does not listen."""

        self.answers.append(send)
        return put

    async def open(self, streams: int, *, reads: bool = True) -> None:
        await self.protocol.initiate()
        for _ in range(streams):
            self.client.send_headers(self.client.get_next_available_stream_id(), OPEN, end_stream=True)
        await self.flush()
        for answer in self.answers:
            await answer({"type": "http.response.start", "status": 200, "headers": []})
        if reads:
            self.read()

    async def flush(self) -> None:
        """What the client has to send."""
        await self.protocol.handle(RawData(self.client.data_to_send()))

    def read(self) -> dict[int, bytes]:
        """What the client has received since the last time, by stream."""
        got: dict[int, bytes] = {}
        for data in self.writes:
            for event in self.client.receive_data(data):
                if isinstance(event, h2.events.DataReceived):
                    got[event.stream_id] = got.get(event.stream_id, b"") + event.data
        self.writes.clear()
        return got

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def piece(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_pieces_of_many_streams_are_one_write() -> None:
    wire = Wire()
    await wire.open(16)
    await turns()
    wire.read()
    for number in range(3):
        for answer in wire.answers:
            await answer(piece(b"%d" % number))
    await turns()
    assert len(wire.writes) == 1
    assert wire.read() == dict.fromkeys(range(1, 33, 2), b"012")
    for answer in wire.answers:
        await answer(piece(b"last"))
        await answer({"type": "http.response.body", "body": b"", "more_body": False})
    assert wire.read() == dict.fromkeys(range(1, 33, 2), b"last")
    await wire.close()


async def test_a_piece_waits_for_the_window_of_its_stream() -> None:
    wire = Wire(window=10)
    await wire.open(2)
    await turns()
    wire.read()
    first, second = wire.answers
    for number in range(4):
        await first(piece(b"%d23456" % number))
    await second(piece(b"free"))
    await turns()
    assert wire.read() == {1: b"0234561234", 3: b"free"}
    wire.client.increment_flow_control_window(100, 1)
    await wire.flush()
    await turns()
    assert wire.read() == {1: b"56223456323456"}
    await first(piece(b"more"))
    await turns()
    assert wire.read() == {1: b"more"}
    await wire.close()


async def test_all_streams_share_the_window_of_the_connection() -> None:
    wire = Wire(window=1 << 20)
    await wire.open(8)
    await turns()
    wire.read()
    for answer in wire.answers:
        await answer(piece(b"x" * 10_000))
    await turns()
    assert sum(map(len, wire.read().values())) == 65_535
    wire.client.increment_flow_control_window(1 << 20)
    await wire.flush()
    await turns()
    assert sum(map(len, wire.read().values())) == 80_000 - 65_535
    await wire.close()


async def test_a_reset_stream_receives_no_more_pieces() -> None:
    wire = Wire()
    await wire.open(2)
    await turns()
    wire.read()
    wire.client.reset_stream(1)
    await wire.flush()
    for answer in wire.answers:
        await answer(piece(b"late"))
    await turns()
    assert wire.read() == {3: b"late"}
    await wire.close()


async def test_a_writer_waits_while_its_client_does_not_read() -> None:
    wire = Wire(window=10)
    await wire.open(1)
    await turns()
    wire.read()
    (answer,) = wire.answers
    produced = 0

    async def produce() -> None:
        nonlocal produced
        for _ in range(100):
            await answer(piece(b"x" * 10_000))
            produced += 1

    writing = asyncio.create_task(produce())
    await turns()
    assert not writing.done()
    assert produced < 10
    wire.client.increment_flow_control_window(1 << 20, 1)
    wire.client.increment_flow_control_window(1 << 20)
    await wire.flush()
    for _ in range(20):
        await turns()
    assert writing.done()
    assert produced == 100
    await wire.close()


async def test_the_end_of_a_connection_lets_its_writers_go() -> None:
    wire = Wire(window=10)
    await wire.open(1)
    await turns()
    (answer,) = wire.answers

    async def produce() -> None:
        for _ in range(100):
            await answer(piece(b"x" * 10_000))

    writing = asyncio.create_task(produce())
    await turns()
    await wire.protocol.handle(Closed())
    await asyncio.wait_for(asyncio.wait({writing}), 30)
    assert writing.done()
    await wire.close()


async def test_one_request_too_many_ends_no_stream() -> None:
    wire = Wire()
    wire.protocol.config.keep_alive_max_requests = 2
    await wire.open(3, reads=False)  # h2's client reads nothing behind a GOAWAY
    await turns()
    for number, answer in enumerate(wire.answers):
        await answer(piece(b"%d" % number))
    await turns()
    frames = b"".join(wire.writes)
    assert b"\0\0\x08\x07" in frames  # GOAWAY: new requests go to another connection
    assert [frames.count(b"\0\0\x01\0\0\0\0\0%c%d" % (2 * number + 1, number)) for number in range(3)] == [1, 1, 1]
    await wire.close()


async def test_pings_that_answer_data_are_no_flood() -> None:
    wire = Wire(window=1 << 20)
    await wire.open(1)
    await turns()
    wire.read()
    (answer,) = wire.answers
    for _ in range(3 * BURST):
        await answer(piece(b"x"))
        await turns()
        assert list(wire.read()) == [1], "the connection goes on"
        wire.client.ping(b"12345678")
        await wire.flush()
    await wire.close()


async def test_what_a_client_sends_behind_its_trailers_is_read() -> None:
    wire = Wire()
    await wire.protocol.initiate()
    wire.client.send_headers(1, [*OPEN, ("te", "trailers")])
    await wire.flush()
    (answer,) = wire.answers
    await answer({"type": "http.response.start", "status": 200, "headers": [], "trailers": True})
    await answer({"type": "http.response.body", "body": b"", "more_body": False})
    await answer({"type": "http.response.trailers", "headers": [(b"x", b"y")], "more_trailers": False})
    await turns()
    for data in wire.writes:
        wire.client.receive_data(data)
    wire.writes.clear()
    wire.client.send_data(1, b"late")
    await wire.flush()
    await turns()
    events = [event for data in wire.writes for event in wire.client.receive_data(data)]
    assert not [event for event in events if isinstance(event, h2.events.StreamReset)]
    await wire.close()


async def test_a_stopping_server_refuses_streams_for_another_one() -> None:
    wire = Wire()
    await wire.protocol.initiate()
    await wire.protocol.context.terminated.set()
    wire.client.send_headers(1, OPEN, end_stream=True)
    await wire.flush()
    events = [event for data in wire.writes for event in wire.client.receive_data(data)]
    resets = [event.error_code for event in events if isinstance(event, h2.events.StreamReset)]
    assert resets == [h2.errors.ErrorCodes.REFUSED_STREAM]
    await wire.close()
