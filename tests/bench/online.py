"""Drive a server from several client processes, as one may be too slow for a GPU's server.

    python -m tests.bench online --model DIR --points 64:512:128,256:512:128 -- --device cuda
    python -m tests.bench online --url http://127.0.0.1:8000 --points 64:512:128

Points, prompts and what counts as a request are those of ``serving``; the streams of a point are spread over
``--clients`` processes that begin at the same moment. A point's first run warms the server up and does not count.
Beside the numbers stand the cores that the server's main process, its worker and the busiest client used.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import psutil

from tests.bench._options import server_command_line
from tests.bench._record import record
from tests.bench.serving import Client, OwnServer, Point, Sample, cpu_name, percentile, streams

__all__ = ["Online", "run_point"]


class Part(msgspec.Struct):
    """Measurements of a client process. Times in seconds; ``began`` and ``ended`` by the machine's monotonic clock."""

    began: float
    ended: float
    cpu: float
    tokens: int
    ttft: list[float]
    gaps: list[float]
    errors: list[str]


@dataclass(frozen=True)
class Online:
    """A run of a point. ``rate``: output tokens a second; latencies in ms; ``main``, ``worker``, ``client``: cores."""

    rate: float
    ttft50: float
    ttft99: float
    itl50: float
    itl99: float
    main: float
    worker: float
    client: float
    errors: tuple[str, ...]


def run_point(
    url: str,
    model: str,
    point: Point,
    requests: int,
    vocab: tuple[int, int],
    seed: int,
    clients: int,
    server: int | None,
) -> Online:
    """``requests`` in all; ``server``: the process whose cores are counted, with its workers."""
    count = min(clients, point.concurrency)
    spread = [point.concurrency // count + (index < point.concurrency % count) for index in range(count)]
    shares = [requests // count + (index < requests % count) for index in range(count)]
    processes = []
    for index in range(count):
        own = f"{spread[index]}:{point.input_len}:{point.output_len}"
        command = [sys.executable, "-m", "tests.bench", "online", "--client", "--url", url, "--model-name", model]
        command += ["--points", own, "--requests", str(shares[index]), "--token-ids", f"{vocab[0]}:{vocab[1]}"]
        command += ["--seed", str(1000 * seed + index)]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()  # it is ready
    before = _cpu_seconds(server)
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
    parts = [msgspec.json.decode(process.communicate()[0], type=Part) for process in processes]
    after = _cpu_seconds(server)
    wall = max(part.ended for part in parts) - min(part.began for part in parts)
    gaps = [gap for part in parts for gap in part.gaps]
    ttft = [one for part in parts for one in part.ttft]
    return Online(
        rate=sum(part.tokens for part in parts) / wall,
        ttft50=percentile(ttft, 0.5) * 1e3,
        ttft99=percentile(ttft, 0.99) * 1e3,
        itl50=percentile(gaps, 0.5) * 1e3,
        itl99=percentile(gaps, 0.99) * 1e3,
        main=(after[0] - before[0]) / wall,
        worker=(after[1] - before[1]) / wall,
        client=max(part.cpu for part in parts) / wall,
        errors=tuple(error for part in parts for error in part.errors),
    )


def _cpu_seconds(server: int | None) -> tuple[float, float]:
    """Processor seconds of the server's main process and of its busiest worker."""
    if server is None:
        return 0.0, 0.0
    main = psutil.Process(server)
    workers = [child.cpu_times() for child in main.children(recursive=True)]
    own = main.cpu_times()
    return own.user + own.system, max((times.user + times.system for times in workers), default=0.0)


async def _client(options: argparse.Namespace) -> None:
    """One client process: report readiness, wait for a line, print the measurements."""
    point = Point.parse(options.points)
    low, high = (int(bound) for bound in options.token_ids.split(":"))
    bodies = streams(options.model_name, point, options.requests, (low, high), options.seed)
    print("ready", flush=True)
    sys.stdin.readline()
    samples: list[Sample] = []
    waiting = iter(bodies)

    async def stream() -> None:
        client = Client(options.url)
        for body in waiting:
            samples.append(await client.complete(body, point.output_len))
        await client.close()

    began = time.monotonic()
    await asyncio.gather(*(stream() for _ in range(point.concurrency)))
    ended = time.monotonic()
    own = psutil.Process().cpu_times()
    good = [sample for sample in samples if not sample.error]
    part = Part(
        began=began,
        ended=ended,
        cpu=own.user + own.system,
        tokens=sum(sample.tokens for sample in good),
        ttft=[sample.ttft for sample in good],
        gaps=[gap for sample in good for gap in sample.gaps],
        errors=[sample.error for sample in samples if sample.error],
    )
    sys.stdout.buffer.write(msgspec.json.encode(part))


def bench(options: argparse.Namespace) -> int:
    server = None
    if options.url is None:
        server = OwnServer(options.model, options.server_args)
        asyncio.run(server.wait_ready(options.start_limit))
    url = options.url or server.url  # type: ignore[union-attr]
    try:
        model = options.model_name or asyncio.run(_first_model(url))
        low, high = (int(bound) for bound in options.token_ids.split(":"))
        print(f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores, {time.strftime('%Y-%m-%d')}; {model}")
        columns = ("point", "tok/s", "TTFT p50 ms", "TTFT p99 ms", "ITL p50 ms", "ITL p99 ms", "failed")
        print("| " + " | ".join((*columns, "cores: main", "worker", "client")) + " |")
        print("|" + "---|" * 10)
        failures = 0
        for point in (Point.parse(text) for text in options.points.split(",")):
            found = []
            for number in range(options.rounds + 1):
                requests = point.concurrency * (options.requests if number else 1)
                seed = options.seed + number
                pid = None if server is None else server.process.pid
                found.append(run_point(url, model, point, requests, (low, high), seed, options.clients, pid))
            print(line(point, found[1:]), flush=True)
            record(str(point), "tokens/s", [one.rate for one in found[1:]])
            record(str(point), "TTFT p50", [one.ttft50 for one in found[1:]], "ms")
            record(str(point), "ITL p50", [one.itl50 for one in found[1:]], "ms")
            for error in {error for one in found for error in one.errors}:
                print(f"  {error}")
            failures += sum(len(one.errors) for one in found)
        return 1 if failures else 0
    finally:
        if server is not None:
            server.stop()


def line(point: Point, found: Sequence[Online]) -> str:
    """A row of the table: medians of the runs."""

    def middle(name: str, digits: int) -> str:
        return f"{statistics.median(getattr(one, name) for one in found):.{digits}f}"

    cells = [middle("rate", 0), middle("ttft50", 1), middle("ttft99", 1), middle("itl50", 2), middle("itl99", 2)]
    cells += [str(sum(len(one.errors) for one in found)), middle("main", 2), middle("worker", 2), middle("client", 2)]
    return f"| {point} | " + " | ".join(cells) + " |"


async def _first_model(url: str) -> str:
    client = Client(url)
    _, models = await client.json("GET", "/v1/models")
    await client.close()
    return str(models["data"][0]["id"])  # type: ignore[index]


def main(argv: list[str]) -> int:
    parser = server_command_line(__name__, __doc__, "64:512:128,256:512:128", rounds=2)
    parser.add_argument("--clients", type=int, default=4, help="client processes")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.client:
        asyncio.run(_client(options))
        return 0
    return bench(options)
