"""Read many streams of one server at once, at little cost, for a period of time."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import grpc
import msgspec
import psutil

from app.apis.grpc.messages import SERVICE, message
from tests.bench._costless import TOKEN_TEXT

__all__ = ["Streamed", "stream", "stream_grpc"]

_EVENT = b"data: {"


@dataclass
class Streamed:
    """Tokens and events a second of a period, and processor microseconds a token of each process.

    ``kernel``: of the server's, those inside the kernel: writes to sockets and what wakes their readers.
    """

    tokens: float
    events: float
    server: float
    kernel: float
    worker: float
    client: float

    @property
    def busy(self) -> float:
        """Cores that the server's main process used."""
        return self.server * self.tokens / 1e6


class _Reader(asyncio.Protocol):
    """One request, sent at once; counts events without parsing them."""

    def __init__(self, request: bytes, begun: asyncio.Semaphore) -> None:
        self._request = request
        self._begun = begun
        self.tokens = 0
        self.events = 0
        self.ended = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.events and _EVENT not in data and not data.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"the server answered {data[:400]!r}")
        events = data.count(_EVENT)
        if events and not self.events:
            self._begun.release()
        self.events += events
        self.tokens += data.count(TOKEN_TEXT)

    def connection_lost(self, error: Exception | None) -> None:
        self.ended = True


class _Counter:
    """Reads one stream of gRPC. A response is an event; the last one read says how many tokens there were."""

    def __init__(self, call: Any, begun: asyncio.Semaphore) -> None:
        self.call = call
        self.events = 0
        self.ended = False
        self._begun = begun
        self._last = b""
        self.reading = asyncio.create_task(self._read())

    @property
    def tokens(self) -> int:
        return int(message("GenerateResponse").FromString(self._last).chunk.completion_tokens)

    async def _read(self) -> None:
        try:
            async for response in self.call:
                self._last = response
                self.events += 1
                if self.events == 1:
                    self._begun.release()
        finally:
            self.ended = True

    async def close(self) -> None:
        self.call.cancel()
        await asyncio.gather(self.reading, return_exceptions=True)


async def stream_grpc(
    host: str, port: int, pids: dict[str, int], *, streams: int, max_tokens: int, seconds: float
) -> Streamed:
    """As :func:`stream`, by ``Generate`` of the gRPC service, on four connections."""
    begun = asyncio.Semaphore(0)
    channels = [grpc.aio.insecure_channel(f"{host}:{port}", options=(("grpc.use_local_subchannel_pool", 1),))
                for _ in range(4)]  # fmt: skip
    counters = []
    for number in range(streams):
        request = message("GenerateRequest")(
            tokenized={"input_ids": [300 + number % 1000, *range(500, 515)]},
            sampling_params={"max_new_tokens": max_tokens, "ignore_eos": True},
            stream=True,
        )
        generate = channels[number % len(channels)].unary_stream(
            f"/{SERVICE}/Generate", request_serializer=type(request).SerializeToString, response_deserializer=bytes
        )
        counters.append(_Counter(generate(request), begun))
    try:
        return await _measured(counters, begun, pids, seconds)
    finally:
        for counter in counters:
            await counter.close()
        for channel in channels:
            await channel.close()


async def stream(
    host: str, port: int, pids: dict[str, int], *, streams: int, max_tokens: int, seconds: float
) -> Streamed:
    """Open ``streams`` streams; measure for ``seconds`` from the moment that all have begun."""
    loop = asyncio.get_running_loop()
    begun = asyncio.Semaphore(0)
    readers: list[_Reader] = []
    for number in range(streams):
        body = msgspec.json.encode(
            {
                "prompt": [300 + number % 1000, *range(500, 515)],
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "stream": True,
            }
        )
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        _, reader = await loop.create_connection(lambda request=request: _Reader(request, begun), host, port)
        readers.append(reader)
    try:
        return await _measured(readers, begun, pids, seconds)
    finally:
        for reader in readers:
            reader.transport.abort()
        await asyncio.sleep(0.1)  # so that the loop closes them


async def _measured(readers: Any, begun: asyncio.Semaphore, pids: dict[str, int], seconds: float) -> Streamed:
    async with asyncio.timeout(30):
        for _ in readers:
            await begun.acquire()
    await asyncio.sleep(0.5)
    processes = {name: psutil.Process(pid) for name, pid in pids.items()}

    def used() -> dict[str, float]:
        times = {name: process.cpu_times() for name, process in processes.items()}
        both = {name: spent.user + spent.system for name, spent in times.items()}
        return both | {"kernel": times["server"].system}

    start, cpu = time.perf_counter(), used()
    tokens, events = sum(r.tokens for r in readers), sum(r.events for r in readers)
    await asyncio.sleep(seconds)
    wall, cpu_after = time.perf_counter() - start, used()
    tokens, events = sum(r.tokens for r in readers) - tokens, sum(r.events for r in readers) - events
    if any(reader.ended for reader in readers):
        raise SystemExit("streams ended while they were measured: raise the tokens of each")
    each = {name: (cpu_after[name] - cpu[name]) * 1e6 / max(tokens, 1) for name in cpu}
    return Streamed(tokens / wall, events / wall, each["server"], each["kernel"], each["worker"], each["client"])
