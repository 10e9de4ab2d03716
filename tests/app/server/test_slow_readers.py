"""Clients that do not read, on real sockets and a real engine: the batch goes on without them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import msgspec
import pytest
from hypercorn.asyncio.tcp_server import TCPServer

from actors.options import Arguments
from app.application import Troupe, create_app
from tests.kits.waiting import PATIENCE

MANY = {"prompt": [5, 6, 7], "max_tokens": 200, "n": 8, "ignore_eos": True, "stream": True, "logprobs": 5}
FEW = {"prompt": [8, 9], "max_tokens": 100, "ignore_eos": True, "stream": True}


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system hold no more than some kilobytes of a response, which would otherwise take megabytes."""
    run = TCPServer.run

    async def with_small_buffer(server: TCPServer) -> None:
        server.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        await run(server)

    monkeypatch.setattr(TCPServer, "run", with_small_buffer)


async def never_reads(url: str, body: dict[str, object]) -> socket.socket:
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    taken.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(taken, ("127.0.0.1", int(url.rpartition(":")[2])))
    data = msgspec.json.encode(body)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    await loop.sock_sendall(taken, f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return taken


async def test_clients_that_stop_reading_slow_no_other_and_are_disconnected(
    tiny_model: Path,
    serve: Callable[[Troupe], Awaitable[str]],
    until: Callable[[Callable[[], object]], Awaitable[None]],
    small_buffers: None,
) -> None:
    application = create_app(
        Arguments(
            model_path=str(tiny_model),
            dtype="float32",
            cpu_threads=1,
            max_total_tokens=8192,
            max_running_requests=32,
            skip_server_warmup=True,
        )
    )
    service, engine = application.service, application.engine
    url = await serve(application)
    await until(lambda: engine.status.phase == "ready")
    dead = [await never_reads(url, MANY) for _ in range(2)]
    try:
        await until(lambda: engine.intake is not None and engine.intake.admission.sequences == 16)
        async with httpx.AsyncClient(timeout=PATIENCE) as client:
            answers = await asyncio.gather(*(client.post(f"{url}/v1/completions", json=FEW) for _ in range(4)))
        assert all(answer.text.endswith("data: [DONE]\n\n") and "error" not in answer.text for answer in answers)

        # The engine has made every token of those who do not read: none of its steps waited for them.
        await until(lambda: engine.board.scheduler is not None and engine.board.scheduler.running == 0)
        await until(lambda: len(service.live) == 2)  # the others' exchanges end after their last byte
        assert engine.intake is not None
        for request in engine.intake._requests.values():
            buffer = request.buffer
            # The scheduler is done before its last tokens have passed the detokenizer.
            await until(lambda buffer=buffer: buffer.output_tokens == 8 * 200)
            held = sum(len(delta.token_ids) for waiting in buffer._pending.values() for delta in waiting)
            assert 0 < held <= 8 * 200  # what waits is never more than the request itself

        # Only now is it their turn to lose it, by the deadline of a single piece.
        for exchange in service.live:
            exchange._send_deadline = 0.2
        await until(lambda: not service.live)
        await until(lambda: engine.intake.admission.sequences == len(engine.intake) == 0)
        await until(lambda: engine.board.cache() is not None and engine.board.cache().used == 0)
        await until(lambda: (engine.registry.get_sample_value("troupe_slow_reader_seconds_count") or 0) >= 2)
    finally:
        for taken in dead:
            taken.close()
