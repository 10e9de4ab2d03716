"""Drive a server and print throughput, time to first token and inter-token latency.

    python -m tests.bench serving                                  # its own server, the included model
    python -m tests.bench serving --model DIR --points 1:128:128,8:512:128
    python -m tests.bench serving --url http://127.0.0.1:8000      # any OpenAI-compatible server

A point is ``concurrency:input tokens:output tokens``; a closed loop keeps that many streams of ``/v1/completions``
open. Prompts are random token ids, seeded by everything that makes runs differ, so that no run finds another's prompts
in a prefix cache. A request counts only when its stream ended with ``[DONE]`` and its usage says the output length
that was asked for; all else is failed. A chunk of n tokens that comes g seconds after the one before counts as n
latencies of g/n. Points are run in rounds, one after the other, and the median of the rounds is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import psutil

from tests.bench._options import server_command_line
from tests.bench._record import record
from tests.kits.addresses import hold_port, port_of


@dataclass
class Sample:
    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str = ""


@dataclass
class Point:
    concurrency: int
    input_len: int
    output_len: int

    @classmethod
    def parse(cls, text: str) -> Point:
        return cls(*(int(part) for part in text.split(":")))

    def __str__(self) -> str:
        return f"{self.concurrency}:{self.input_len}:{self.output_len}"


def percentile(values: list[float], share: float) -> float:
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Client:
    """A minimal HTTP/1.1 client with one keep-alive connection, which costs little beside the server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._prefix = parts.path.rstrip("/")
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
            self._writer = None

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None or self._reader.at_eof():
            await self.close()
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        return self._reader, self._writer

    async def _send(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, str], asyncio.StreamReader]:
        reader, writer = await self._open()
        head = (
            f"{method} {self._prefix}{path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        status = int((await reader.readline()).split()[1])
        headers = {}
        while (line := (await reader.readline()).strip()) != b"":
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        return status, headers, reader

    async def _chunks(self, headers: dict[str, str], reader: asyncio.StreamReader):  # type: ignore[no-untyped-def]
        if headers.get("transfer-encoding") == "chunked":
            while size := int((await reader.readline()).split(b";")[0], 16):
                yield await reader.readexactly(size)
                await reader.readexactly(2)
            await reader.readline()
        else:
            yield await reader.readexactly(int(headers.get("content-length", "0")))

    async def json(self, method: str, path: str, body: object = None) -> tuple[int, object]:
        data = msgspec.json.encode(body) if body is not None else b""
        status, headers, reader = await self._send(method, path, data)
        text = b"".join([chunk async for chunk in self._chunks(headers, reader)])
        return status, msgspec.json.decode(text) if text else None

    async def text(self, path: str) -> str:
        """A page as text, whatever its status."""
        _, headers, reader = await self._send("GET", path, b"")
        return b"".join([chunk async for chunk in self._chunks(headers, reader)]).decode()

    async def complete(self, body: dict[str, object], output_len: int) -> Sample:
        sample = Sample()
        start = last = time.perf_counter()
        done, usage = False, 0
        chunk_times: list[float] = []
        try:
            status, headers, reader = await self._send("POST", "/v1/completions", msgspec.json.encode(body))
            rest = b""
            async for chunk in self._chunks(headers, reader):
                now = time.perf_counter()
                if status != 200:
                    rest += chunk
                    continue
                rest += chunk
                *events, rest = rest.split(b"\n\n")
                for event in events:
                    if not event.startswith(b"data:"):
                        continue
                    data = event[5:].strip()
                    if data == b"[DONE]":
                        done = True
                        continue
                    record = msgspec.json.decode(data)
                    if "error" in record:
                        sample.error = str(record["error"])[:200]
                        continue
                    usage = (record.get("usage") or {}).get("completion_tokens", usage)
                    if record.get("choices"):
                        if not chunk_times:
                            sample.ttft = now - start
                        else:
                            sample.gaps.append(now - last)
                        chunk_times.append(now)
                        last = now
            if status != 200:
                sample.error = f"HTTP {status}: {rest[:200]!r}"
            elif not done or usage != output_len:
                sample.error = sample.error or f"ended with {usage} of {output_len} tokens, done={done}"
        except (OSError, ValueError, asyncio.IncompleteReadError, IndexError) as error:
            sample.error = f"{type(error).__name__}: {error}"
            await self.close()
        sample.tokens = usage
        if sample.gaps and usage > 1:
            # Chunks may carry several tokens: each token of a chunk gets its share of the gap.
            share = (usage - 1) / len(sample.gaps)
            sample.gaps = [gap / share for gap in sample.gaps]
        return sample


def streams(model: str, point: Point, requests: int, vocab: tuple[int, int], seed: int) -> list[dict[str, object]]:
    """Bodies of a point's requests."""
    bodies = []
    for number in range(requests):
        rng = random.Random(f"{seed}/{point}/{number}")
        bodies.append(
            {
                "model": model,
                "prompt": [rng.randrange(*vocab) for _ in range(point.input_len)],
                "max_tokens": point.output_len,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
    return bodies


async def run_point(
    url: str, model: str, point: Point, requests: int, vocab: tuple[int, int], seed: int, fresh: bool = False
) -> dict:
    """Measure a point. ``fresh``: a new connection for each request, as some servers close it after a stream."""
    bodies = iter(streams(model, point, requests, vocab, seed))
    samples: list[Sample] = []

    async def stream() -> None:
        client = Client(url)
        for body in bodies:
            samples.append(await client.complete(body, point.output_len))
            if fresh:
                await client.close()
        await client.close()

    start = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(point.concurrency)))
    wall = time.perf_counter() - start
    good = [s for s in samples if not s.error]
    gaps = [gap for s in good for gap in s.gaps]
    return {
        "tok/s": sum(s.tokens for s in good) / wall,
        "ttft50": percentile([s.ttft for s in good], 0.5) * 1e3,
        "ttft99": percentile([s.ttft for s in good], 0.99) * 1e3,
        "itl50": percentile(gaps, 0.5) * 1e3,
        "itl99": percentile(gaps, 0.99) * 1e3,
        "failed": len(samples) - len(good),
        "error": next((s.error for s in samples if s.error), ""),
    }


class OwnServer:
    """A server started for the benchmark; ``ready_seconds`` from the process start to the first 200 of /ready."""

    def __init__(self, model: str | None, extra: list[str], serve: Sequence[str] = ("app", "serve")) -> None:
        self._held = hold_port()
        port = port_of(self._held)
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", *serve, *([model] if model else []), "--port", str(port), *extra]
        fd, self._log = tempfile.mkstemp(prefix="troupe-bench-")
        self._start = time.perf_counter()
        self.process = subprocess.Popen(command, stdout=fd, stderr=fd)
        os.close(fd)
        self.ready_seconds = 0.0

    async def wait_ready(self, limit: float = 600.0) -> None:
        while True:
            if self.process.poll() is not None or time.perf_counter() - self._start > limit:
                raise SystemExit(f"the server did not start:\n{self.log_text()[-4000:]}")
            client = Client(self.url)
            with contextlib.suppress(OSError, IndexError):
                status, _ = await client.json("GET", "/ready")
                if status == 200:
                    self.ready_seconds = time.perf_counter() - self._start
                    await client.close()
                    return
            await client.close()
            await asyncio.sleep(0.05)

    def resident(self) -> float:
        """MiB of the server's processes, memory they share counted once (PSS)."""
        return sum(p.memory_full_info().pss for p in self.family()) / 2**20

    def family(self) -> list[psutil.Process]:
        """The server's processes, the main one first."""
        main = psutil.Process(self.process.pid)
        return [main, *main.children(recursive=True)]

    def log_text(self) -> str:
        """What it has written so far."""
        return Path(self._log).read_text(errors="replace")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._held.close()
        Path(self._log).unlink(missing_ok=True)


def cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _record(point: str, results: list[dict]) -> None:
    """Keep the rounds of a point."""
    for key, metric, unit in (
        ("tok/s", "tokens/s", ""),
        ("ttft50", "TTFT p50", "ms"),
        ("ttft99", "TTFT p99", "ms"),
        ("itl50", "ITL p50", "ms"),
        ("itl99", "ITL p99", "ms"),
    ):
        record(point, metric, [result[key] for result in results], unit)


async def bench(options: argparse.Namespace) -> int:
    server = None
    if options.url is None:
        server = OwnServer(options.model, options.server_args)
        await server.wait_ready(options.start_limit)
    url = options.url or server.url  # type: ignore[union-attr]
    try:
        client = Client(url)
        _, models = await client.json("GET", "/v1/models")
        await client.close()
        model = options.model_name or models["data"][0]["id"]  # type: ignore[index]
        low, high = (int(x) for x in options.token_ids.split(":"))
        points = [Point.parse(p) for p in options.points.split(",")]
        print(f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores, {time.strftime('%Y-%m-%d')}; {model}")
        if server is not None:
            print(f"start to ready: {server.ready_seconds:.1f} s; resident when ready: {server.resident():.0f} MiB")
            record("start", "start to ready", server.ready_seconds, "s")
            record("memory", "resident when ready", server.resident(), "MiB")
        rounds: dict[str, list[dict]] = {str(p): [] for p in points}
        for number in range(-1, options.rounds):
            for point in points:
                requests = point.concurrency * (1 if number < 0 else options.requests)
                seed = options.seed + number
                result = await run_point(url, model, point, requests, (low, high), seed)
                if number >= 0:
                    rounds[str(point)].append(result)
        print("| point | tok/s | TTFT p50 ms | TTFT p99 ms | ITL p50 ms | ITL p99 ms | failed |")
        print("|---|---|---|---|---|---|---|")
        failures = 0
        for point in points:
            results = rounds[str(point)]
            middle = {k: statistics.median(r[k] for r in results) for k in results[0] if k != "error"}
            failed = sum(r["failed"] for r in results)
            failures += failed
            print(
                f"| {point} | {middle['tok/s']:.0f} | {middle['ttft50']:.1f} | {middle['ttft99']:.1f} "
                f"| {middle['itl50']:.2f} | {middle['itl99']:.2f} | {failed} |"
            )
            _record(str(point), results)
            for result in results:
                if result["error"]:
                    print(f"  {result['error']}")
                    break
        if server is not None:
            print(f"resident at the end: {server.resident():.0f} MiB")
            record("memory", "resident at the end", server.resident(), "MiB")
        return 1 if failures else 0
    finally:
        if server is not None:
            server.stop()


def main(argv: list[str]) -> int:
    parser = server_command_line(__name__, __doc__, "1:128:128,8:128:128,32:128:64", rounds=3)
    return asyncio.run(bench(parser.parse_args(argv)))
