"""Clients that are slow or say nothing, in a server of this process with short times: none is waited for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

import app.server.hypercorn
from actors.options import Arguments
from app.application import Troupe
from app.server.hypercorn import configuration, listen, serve
from tests.kits.raw_http import HEAD, statuses
from tests.kits.waiting import PATIENCE, until


@pytest.fixture
async def hurried(
    make_application: Callable[..., Troupe], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Troupe, int]]:
    monkeypatch.setattr(app.server.hypercorn, "HEADER_TIMEOUT", 1.0)
    monkeypatch.setattr(app.server.hypercorn, "_signals", lambda numbers, handler: contextlib.nullcontext())
    application = make_application()
    application.config["BODY_TIMEOUT"] = 0.3
    config = configuration(Arguments(port=0))
    config.keep_alive_timeout = 0.6
    config.graceful_timeout = 1
    sockets = listen(config)
    port = sockets.insecure_sockets[0].getsockname()[1]
    task = asyncio.create_task(serve(application, application, config, sockets))
    try:
        yield application, port
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def dripping(port: int, before: bytes, drip: bytes) -> bytes:
    """Send byte by byte until the server has had enough."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    with contextlib.suppress(ConnectionError):
        writer.write(before)
        async with asyncio.timeout(PATIENCE):
            while not reader.at_eof():
                writer.write(drip)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        answer += await reader.read(1 << 16)
    writer.close()
    return answer


async def test_a_head_that_comes_drop_by_drop_is_not_waited_for(hurried: tuple[Troupe, int]) -> None:
    assert await dripping(hurried[1], b"GET /version HTTP/1.1\r\nHost: x\r\nX: ", b"a") == b""


async def test_a_silent_connection_is_closed(hurried: tuple[Troupe, int]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", hurried[1])
    async with asyncio.timeout(PATIENCE):
        assert await reader.read() == b""
    writer.close()


async def test_a_second_head_that_comes_drop_by_drop_is_not_waited_for(hurried: tuple[Troupe, int]) -> None:
    answer = await dripping(hurried[1], b"GET /live HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\nX: ", b"a")
    assert statuses(answer) == [200]


async def test_a_body_that_comes_drop_by_drop_is_a_408(hurried: tuple[Troupe, int]) -> None:
    answer = await dripping(hurried[1], (HEAD + "Content-Length: 100000\r\n\r\n").encode(), b" ")
    assert statuses(answer) == [408]


async def test_a_server_keeps_files_for_itself(hurried: tuple[Troupe, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.server.hypercorn, "HEADER_TIMEOUT", PATIENCE)  # silent connections stay
    limit = app.server.hypercorn.ConnectionLimit()
    assert limit.limit >= 64
    monkeypatch.setattr(app.server.hypercorn, "ConnectionLimit", lambda: limit)
    monkeypatch.setattr(limit, "limit", 2)
    application, config = hurried[0], configuration(Arguments(port=0))
    sockets = listen(config)
    port = sockets.insecure_sockets[0].getsockname()[1]
    task = asyncio.create_task(serve(application, application, config, sockets))
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    async with asyncio.timeout(PATIENCE):
        with contextlib.suppress(ConnectionError):
            assert await held[2][0].read() == b""
        assert limit.open == 2
        for _, writer in held:
            writer.close()
        await until(lambda: not limit.open)
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as client:
            assert (await client.get(f"http://127.0.0.1:{port}/live")).status_code == 200
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
