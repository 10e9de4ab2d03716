"""The server loop: signals, draining, failure, settings. The application is a small ASGI one."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import httpx
import hypercorn.asyncio.run
import hypercorn.protocol
import hypercorn.protocol.h11
import pytest
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.events import RawData
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import HTTPStream

import app.server.hypercorn
from actors.options import Arguments
from app.server.hypercorn import READS_A_TURN, SIGNALS, ConnectionLimit, configuration, listen, serve
from tests.kits.waiting import PATIENCE


class Application:
    """Streams a chunk, and the last one when it is drained; counts what the server tells it."""

    def __init__(self) -> None:
        self.failed = asyncio.Event()
        self.let_go = asyncio.Event()  # a request may end
        self.streaming = asyncio.Event()
        self.idle = asyncio.Event()
        self.draining = asyncio.Event()
        self.drains: list[float | None] = []
        self.closed = False

    async def drain(self, timeout: float | None = None) -> bool:
        self.drains.append(timeout)
        self.draining.set()
        if timeout == 0:
            self.let_go.set()
        await self.idle.wait()
        return timeout is None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            self.closed = True
            await send({"type": "lifespan.shutdown.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        self.streaming.set()
        await self.let_go.wait()
        await send({"type": "http.response.body", "body": b"last"})
        self.idle.set()


class Running:
    """A server task, its application, its address and its signal handler."""

    def __init__(self, signals: Sequence[signal.Signals] = SIGNALS) -> None:
        self.application = Application()
        self.config = configuration(Arguments(port=0))
        self.config.graceful_timeout = PATIENCE
        sockets = listen(self.config)
        self.url = f"http://127.0.0.1:{sockets.insecure_sockets[0].getsockname()[1]}"
        self.inheritable = sockets.insecure_sockets[0].get_inheritable()
        self.task = asyncio.create_task(serve(self.application, self.application, self.config, sockets, signals))
        self.signal: Callable[[], None] = lambda: pytest.fail("no signal handler")


@pytest.fixture
async def running(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    server = Running()

    @contextlib.contextmanager
    def signals(numbers: Sequence[signal.Signals], handler: Callable[[], None]) -> Iterator[None]:
        if numbers:
            assert set(numbers) == {signal.SIGTERM, signal.SIGINT}
            server.signal = handler
        yield

    monkeypatch.setattr(app.server.hypercorn, "_signals", signals)
    try:
        yield server
    finally:
        server.task.cancel()
        await asyncio.gather(server.task, return_exceptions=True)


async def stream(server: Running) -> "asyncio.Task[str]":
    async def read() -> str:
        async with httpx.AsyncClient(trust_env=False) as client:
            return (await client.get(server.url, timeout=PATIENCE)).text

    task = asyncio.create_task(read())
    await asyncio.wait_for(server.application.streaming.wait(), PATIENCE)
    return task


async def test_a_signal_drains_and_nothing_is_cut(running: Running) -> None:
    reader = await stream(running)
    running.signal()
    await asyncio.wait_for(running.application.draining.wait(), PATIENCE)
    assert not running.task.done()
    running.application.let_go.set()
    assert await asyncio.wait_for(running.task, PATIENCE) is True
    assert await reader == "firstlast"
    assert running.application.drains == [None]
    assert running.application.closed


async def test_a_second_signal_ends_the_draining(running: Running) -> None:
    reader = await stream(running)
    running.signal()
    running.signal()
    assert await asyncio.wait_for(running.task, PATIENCE) is True
    assert await reader == "firstlast"
    assert running.application.drains[-1] == 0
    assert running.application.closed


async def test_a_failed_engine_ends_the_server(running: Running) -> None:
    running.application.failed.set()
    assert await asyncio.wait_for(running.task, PATIENCE) is False
    assert running.application.drains == []
    assert running.application.closed


async def test_a_draining_that_fails_still_stops(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(timeout: float | None = None) -> bool:
        raise RuntimeError("no")

    monkeypatch.setattr(running.application, "drain", broken)
    await asyncio.sleep(0)
    running.signal()
    assert await asyncio.wait_for(running.task, PATIENCE) is True
    assert running.application.closed


async def test_a_failed_start_of_the_application_is_raised(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no such thing"})

    config = configuration(Arguments(port=0))
    with pytest.raises(Exception, match="no such thing"):
        await asyncio.wait_for(serve(broken, running.application, config, listen(config)), PATIENCE)


@pytest.mark.parametrize("requests", [0, 1, 2])
async def test_a_client_that_has_gone_keeps_no_connection(running: Running, requests: int) -> None:
    """Its socket is closed at once, not when the time to wait for its next request is over."""
    await leave(running, requests)


async def leave(server: Running, requests: int) -> None:
    server.application.let_go.set()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    async with asyncio.timeout(PATIENCE):
        for _ in range(requests):
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.write_eof()
        assert await reader.read() == b""
    writer.close()


async def test_two_servers_and_hypercorns_own_in_one_process_are_independent(running: Running) -> None:
    other = Running(signals=())
    await leave(other, 1)
    assert hypercorn.asyncio.run.TCPServer is TCPServer
    assert hypercorn.protocol.H11Protocol is H11Protocol
    assert hypercorn.protocol.h11.HTTPStream is HTTPStream
    other.application.failed.set()
    assert await asyncio.wait_for(other.task, PATIENCE) is False
    await leave(running, 1)
    running.signal()
    assert await asyncio.wait_for(running.task, PATIENCE) is True


async def test_the_port_is_not_inherited(running: Running) -> None:
    assert running.inheritable is False


def test_settings() -> None:
    config = configuration(Arguments(host="::1", port=7))
    assert config.bind == ["[::1]:7"]
    assert config.accesslog is None
    assert config.backlog == 2048
    assert config.keep_alive_timeout > 60
    assert config.startup_timeout >= 600
    assert config.workers == 1
    assert configuration(Arguments(host="0.0.0.0")).bind == ["0.0.0.0:8000"]


PROGRAM = """
import asyncio, sys
from actors.options import Arguments
from app.server.hypercorn import configuration, listen, serve

class Application:
    def __init__(self):
        self.failed = asyncio.Event()
    async def drain(self, timeout=None):
        print("drained", flush=True)
        return True
    async def __call__(self, scope, receive, send):
        await receive()
        await send({"type": "lifespan.startup.complete"})
        print("started", flush=True)
        await receive()
        await send({"type": "lifespan.shutdown.complete"})

async def main():
    config = configuration(Arguments(port=0))
    application = Application()
    return await serve(application, application, config, listen(config))

sys.exit(0 if asyncio.run(main()) else 3)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_real_signals(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
            process.send_signal(number)
            out, _ = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert out == "drained\n"
    assert process.returncode == 0


async def test_many_connections_are_read_a_few_at_a_time(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty that have all sent their request in the same moment do not take one turn of the loop for themselves."""
    loop, turn = asyncio.get_running_loop(), 0
    turns: list[int] = []
    all_read = asyncio.Event()

    def count() -> None:
        nonlocal turn
        turn += 1
        if len(turns) < 60:
            loop.call_soon(count)

    handle = H11Protocol.handle

    async def handled(protocol: H11Protocol, event: Any) -> None:
        if isinstance(event, RawData) and event.data:
            turns.append(turn)
            if len(turns) == 60:
                all_read.set()
        await handle(protocol, event)

    monkeypatch.setattr(H11Protocol, "handle", handled)
    port = int(running.url.rpartition(":")[2])
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
    try:
        for each in sockets:
            each.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        loop.call_soon(count)
        async with asyncio.timeout(PATIENCE):
            await all_read.wait()
        assert max(turns.count(number) for number in turns) <= READS_A_TURN
        running.application.let_go.set()
    finally:
        for each in sockets:
            each.close()


def test_at_the_limit_of_files_the_remedy_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    limit = ConnectionLimit()
    assert limit.limit >= 64
    limit.open, limit.limit = 5, 6
    assert not limit.full(0.0)
    limit.open = 6
    assert all(limit.full(second) for second in (1.0, 2.0, 60.0, 61.5))
    output = [record.getMessage() for record in caplog.records]
    assert len(output) == 2
    assert "6 connections" in output[0]
    assert "ulimit -n" in output[0]
