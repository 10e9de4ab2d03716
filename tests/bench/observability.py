"""Measure what metrics and traces cost a server under load, side by side, in about four minutes.

    python -m tests.bench observability
    python -m tests.bench observability --variants off,off,traces,all-traces,steps --minutes 8

A server is started for each variant, on the included model; one at a time is driven over HTTP, the others wait.
``off`` is ``--no-enable-metrics``; ``metrics`` is the default, and is scraped meanwhile; ``traces`` adds
``--trace-sample-ratio 0.01``, ``all-traces`` a ratio of 1, ``steps`` one of 0.01 at level 2; their spans go to a
collector that throws them away. Every round drives all variants for a few seconds each, in an order that turns, and
there are as many rounds as fit into the time. A share is that of a round's throughput in the mean of its ``off``
servers. There are two of these, and what they differ by, which nothing explains, is the noise: a share that is nearer
to 100 % than that says nothing. Processor time a token is disturbed less by other work on the machine.
What recording one request costs without a server: ``python -m tests.bench recording``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import statistics
import time
from collections.abc import AsyncIterator

import psutil

from tests.bench._options import command_line
from tests.bench._record import record
from tests.bench.serving import Client, OwnServer, Point, cpu_name, run_point

_OFF = "off"
_GOALS = {"metrics": 0.99, "traces": 0.98}
_TRACES = {
    "traces": ["--trace-sample-ratio", "0.01"],
    "all-traces": ["--trace-sample-ratio", "1"],
    "steps": ["--trace-sample-ratio", "0.01", "--trace-level", "2"],
}


def server_arguments(variant: str, collector: str) -> list[str]:
    """The arguments of a variant's server."""
    if variant == _OFF:
        return ["--no-enable-metrics"]
    if variant == "metrics":
        return []
    return ["--enable-trace", "--oltp-traces-endpoint", collector, *_TRACES[variant]]


def cpu_seconds(server: OwnServer) -> tuple[float, float]:
    """Processor time so far: of the server's own process, and of its workers too."""
    main = psutil.Process(server.process.pid)
    times = [process.cpu_times() for process in (main, *main.children(recursive=True))]
    spent = [time.user + time.system for time in times]
    return spent[0], sum(spent)


@contextlib.asynccontextmanager
async def collector() -> AsyncIterator[str]:
    """An OTLP endpoint over HTTP that drops what it receives."""

    connections: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.create_task(take(reader, writer)))

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if b"content-length:" in line]
                await reader.readexactly(int(lengths[0]) if lengths else 0)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/traces"
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


class Scraper:
    """Scrapes a server's /metrics every ``interval`` seconds while it is under load."""

    def __init__(self, server: OwnServer, interval: float) -> None:
        self._url = server.url
        self._interval = self._left = interval

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._scrape())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _scrape(self) -> None:
        client = Client(self._url)
        try:
            while True:
                began = time.monotonic()
                try:
                    await asyncio.sleep(self._left)
                finally:
                    self._left = max(0.0, self._left - (time.monotonic() - began))
                await client.text("/metrics")
                self._left = self._interval
        finally:
            await client.close()


async def drive(
    server: OwnServer, scraper: Scraper | None, options: argparse.Namespace, requests: int, seed: int
) -> dict:
    """Drive one variant for its part of a round."""
    point = Point.parse(options.point)
    low, high = (int(bound) for bound in options.token_ids.split(":"))
    async with scraper.running() if scraper is not None else contextlib.nullcontext():
        before = cpu_seconds(server)
        result = await run_point(server.url, "", point, requests, (low, high), seed)
        main, all_ = (after - was for after, was in zip(cpu_seconds(server), before, strict=True))
    tokens = max(1, requests * point.output_len)
    return result | {"main_us": main / tokens * 1e6, "all_us": all_ / tokens * 1e6}


async def bench(options: argparse.Namespace) -> int:
    variants = options.variants.split(",")
    streams = Point.parse(options.point).concurrency
    rounds: list[list[dict]] = []
    began = time.monotonic()
    async with collector() as endpoint:
        servers: list[OwnServer] = []
        try:
            for variant in variants:
                servers.append(OwnServer(options.model, [*server_arguments(variant, endpoint), *options.server_args]))
            for server in servers:
                await server.wait_ready()
            scrapers = [
                Scraper(server, options.scrape) if options.scrape and variant != _OFF else None
                for server, variant in zip(servers, variants, strict=True)
            ]
            longest, number = 0.0, -1  # the first round warms up and does not count
            while number < 3 or time.monotonic() - began + longest < options.minutes * 60:
                since = time.monotonic()
                results: list[dict] = [{}] * len(variants)
                for place in range(len(variants)):
                    at = (place + number) % len(variants)
                    requests = streams * (options.requests if number >= 0 else 1)
                    seed = options.seed + number
                    results[at] = await drive(servers[at], scrapers[at], options, requests, seed)
                if number >= 0:
                    rounds.append(results)
                    longest = max(longest, time.monotonic() - since)
                number += 1
        finally:
            for server in servers:
                server.stop()
    print(f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}, {time.strftime('%F')}")
    print(f"{options.point} (streams:prompt:output), {len(rounds)} rounds of {options.requests} requests a stream")
    return report(variants, rounds)


def report(variants: list[str], rounds: list[list[dict]]) -> int:
    """Print the table; 1 when requests failed. ``rounds``: the results of each, in the order of ``variants``."""
    offs = [at for at, variant in enumerate(variants) if variant == _OFF]
    print("| variant | tok/s | of off | give or take | goal | CPU us a token | of off | of it the server |")
    print("|---|---|---|---|---|---|---|---|")
    for at, variant in enumerate(variants):
        against = [other for other in offs if other != at or len(offs) == 1] if variant == _OFF else offs
        speed = statistics.median(results[at]["tok/s"] for results in rounds)
        share, error = median(_shares(rounds, at, against, "tok/s"))
        # The system counts processor time in hundredths of a second: only the mean of many rounds is finer.
        spent, own = (statistics.fmean(results[at][key] for results in rounds) for key in ("all_us", "main_us"))
        base = statistics.fmean(results[off]["all_us"] for results in rounds for off in against)
        goal = f"{_GOALS[variant]:.0%}" if variant in _GOALS else ""
        print(
            f"| {variant} | {speed:.0f} | {share:.1%} | {error:.1%} | {goal} | {spent:.1f} | {spent / base:.1%} "
            f"| {own:.1f} |"
        )
        record(variant, "tokens/s", [results[at]["tok/s"] for results in rounds])
        record(variant, "tokens/s, of off", 100 * share, "%")
        record(variant, "CPU a token", spent, "us")
    failed = [result["error"] for results in rounds for result in results if result["failed"]]
    if failed:
        print(f"requests failed: {failed[0]}")
    return 1 if failed else 0


def _shares(rounds: list[list[dict]], at: int, against: list[int], key: str) -> list[float]:
    return [results[at][key] / statistics.fmean(results[off][key] for off in against) for results in rounds]


def median(values: list[float]) -> tuple[float, float]:
    """The median and two standard errors of it, from the median deviation and normal noise."""
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return middle, 2 * 1.2533 * deviation / math.sqrt(len(values))


def main(argv: list[str]) -> int:
    parser = command_line(__name__, __doc__, records=True)
    parser.add_argument("--variants", default="off,metrics,traces,off", help="of off, metrics, " + ", ".join(_TRACES))
    parser.add_argument("--point", default="64:32:64", help="streams:prompt tokens:output tokens")
    parser.add_argument("--requests", type=int, default=2, help="requests a stream in each round")
    parser.add_argument("--minutes", type=float, default=4.0, help="for all of it; four rounds are run in any case")
    parser.add_argument("--scrape", type=float, default=5.0, help="seconds between two scrapes of /metrics; 0: none")
    parser.add_argument("--model", help="directory (default: the included model)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--token-ids", default="300:3000", help="LOW:HIGH of the random prompt's token ids")
    parser.add_argument("server_args", nargs="*", help="after --: more arguments for every server")
    options = parser.parse_args(argv)
    unknown = set(options.variants.split(",")) - {_OFF, "metrics", *_TRACES}
    if unknown or _OFF not in options.variants.split(","):
        parser.error(f"--variants: off, and some of metrics, {', '.join(_TRACES)}")
    return asyncio.run(bench(options))
