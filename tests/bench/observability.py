"""What metrics and traces cost: throughput of many streams with them and without, in alternating rounds.

    python -m tests.bench observability                            # off, metrics, metrics and 1 % of traces
    python -m tests.bench observability --variants off,metrics --rounds 9

A server is started for each variant, on the model in the box; one at a time is driven over HTTP, the others wait.
``off`` is ``--no-enable-metrics``; ``metrics`` is the default, and is scraped meanwhile; ``traces`` adds
``--trace-sample-ratio 0.01``, with spans going to a collector that throws them away. Every round drives all variants,
in an order that turns, so that a noisy moment of the machine hits all. A variant's share is the median, over the
rounds, of its throughput divided by that of the first variant in the same round. Where other work disturbs the clock,
processor time for each token says more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import AsyncIterator

import psutil

from tests.bench.serving import Client, OwnServer, Point, cpu_name, run_point

_GOALS = {"metrics": 0.99, "traces": 0.98}


def server_arguments(variant: str, collector: str) -> list[str]:
    """What a variant's server is started with."""
    if variant == "off":
        return ["--no-enable-metrics"]
    if variant == "metrics":
        return []
    return ["--enable-trace", "--oltp-traces-endpoint", collector, "--trace-sample-ratio", "0.01"]


def cpu_seconds(server: OwnServer) -> tuple[float, float]:
    """Processor time so far: of the server's own process, and of its workers too."""
    main = psutil.Process(server.process.pid)
    times = [process.cpu_times() for process in (main, *main.children(recursive=True))]
    spent = [time.user + time.system for time in times]
    return spent[0], sum(spent)


@contextlib.asynccontextmanager
async def collector() -> AsyncIterator[str]:
    """An endpoint that takes OTLP over HTTP and keeps nothing."""

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


async def scrape(url: str, interval: float) -> None:
    """Read /metrics every so often, as Prometheus does."""
    client = Client(url)
    try:
        while True:
            await client.text("/metrics")
            await asyncio.sleep(interval)
    finally:
        await client.close()


async def drive(server: OwnServer, variant: str, options: argparse.Namespace, requests: int, seed: int) -> dict:
    """One variant's part of a round."""
    point = Point.parse(options.point)
    low, high = (int(bound) for bound in options.token_ids.split(":"))
    scraping = None
    if options.scrape and variant != "off":
        scraping = asyncio.create_task(scrape(server.url, options.scrape))
    try:
        before = cpu_seconds(server)
        result = await run_point(server.url, "", point, requests, (low, high), seed)
        main, all_ = (after - was for after, was in zip(cpu_seconds(server), before, strict=True))
        tokens = max(1, requests * point.output_len)
        return result | {"main_us": main / tokens * 1e6, "all_us": all_ / tokens * 1e6}
    finally:
        if scraping is not None:
            scraping.cancel()
            await asyncio.gather(scraping, return_exceptions=True)


async def bench(options: argparse.Namespace) -> int:
    variants = options.variants.split(",")
    servers: dict[str, OwnServer] = {}
    rounds: dict[str, list[dict]] = {variant: [] for variant in variants}
    streams = Point.parse(options.point).concurrency
    async with collector() as endpoint:
        try:
            for variant in variants:
                own = [*server_arguments(variant, endpoint), *options.server_args]
                servers[variant] = OwnServer(options.model, own)
                await servers[variant].wait_ready()
            for number in range(-1, options.rounds):  # the first one warms up and does not count
                turn = max(number, 0) % len(variants)
                for variant in variants[turn:] + variants[:turn]:
                    requests = streams * (options.requests if number >= 0 else 1)
                    result = await drive(servers[variant], variant, options, requests, options.seed + number)
                    if number >= 0:
                        rounds[variant].append(result)
        finally:
            for server in servers.values():
                server.stop()
    print(f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}, {time.strftime('%F')}")
    print(f"{options.point} (streams:prompt:output), {options.rounds} rounds of {options.requests} requests a stream")
    print(
        "| variant | tok/s | of off, median | lowest | highest | goal | CPU us a token | of it the server "
        "| ITL p50 ms | failed |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    failed = 0
    for variant in variants:
        results = rounds[variant]
        middle = {key: statistics.median(r[key] for r in results) for key in ("tok/s", "itl50", "main_us", "all_us")}
        shares = [mine["tok/s"] / off["tok/s"] for mine, off in zip(results, rounds[variants[0]], strict=True)]
        lost = sum(r["failed"] for r in results)
        failed += lost
        goal = f"{_GOALS[variant]:.0%}" if variant in _GOALS else ""
        print(
            f"| {variant} | {middle['tok/s']:.0f} | {statistics.median(shares):.1%} | {min(shares):.1%} "
            f"| {max(shares):.1%} | {goal} | {middle['all_us']:.0f} | {middle['main_us']:.1f} "
            f"| {middle['itl50']:.2f} | {lost} |"
        )
        for result in results:
            if result["error"]:
                print(f"  {result['error']}")
                break
    return 1 if failed else 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench observability", description=__doc__.splitlines()[0])
    parser.add_argument("--variants", default="off,metrics,traces", help="the first one is what the others are held to")
    parser.add_argument("--point", default="64:32:128", help="streams:prompt tokens:output tokens")
    parser.add_argument("--requests", type=int, default=2, help="requests a stream in each round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scrape", type=float, default=5.0, help="seconds between two scrapes of /metrics; 0: none")
    parser.add_argument("--model", help="directory (default: the model in the box)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--token-ids", default="300:3000", help="LOW:HIGH of the random prompt's token ids")
    parser.add_argument("server_args", nargs="*", help="after --: more arguments for every server")
    return asyncio.run(bench(parser.parse_args(argv)))
