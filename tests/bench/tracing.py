"""What metrics and traces cost: throughput of equal servers with them on and off, at many streams.

    python -m tests.bench tracing                       # 64 streams, 7 rounds
    python -m tests.bench tracing --rounds 3 --requests 2 --output-len 32
    python -m tests.bench tracing --record              # the record of a request alone, without a server

All servers run at once and one works at a time, each once a round, in an order that turns from round to round; a share
is the median of the rounds' shares, so that a machine that grows slower meanwhile slows both sides of each. Spans go to
a collector in a process of its own, which throws them away. "CPU" is processor time of the engine's own process, which
other work on the machine disturbs less than it does the throughput. ``--record`` is processor time too: of the HTTP
span, the timeline and all spans of a request of one choice and one prefill chunk, from its arrival to the exporter.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import psutil
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from telemetry.timeline import Outcome, Timelines
from telemetry.trace_export import TraceExport, TraceOptions
from telemetry.tracing import Tracing
from telemetry.worker_spans import TracedRow, forward_spans
from tests.bench.serving import Client, OwnServer, Point, cpu_name, run_point

__all__ = ["main"]

_OFF, _METRICS = "nothing", "metrics"


def _cases(endpoint: str) -> dict[str, tuple[str, list[str]]]:
    """By name: what it is compared with, and the server's arguments."""
    trace = ["--enable-trace", "--oltp-traces-endpoint", endpoint]
    return {
        _OFF: (_OFF, ["--no-enable-metrics"]),
        _METRICS: (_OFF, []),
        "metrics, traces of 1 %": (_METRICS, [*trace, "--trace-sample-ratio", "0.01"]),
        "metrics, traces of 100 %": (_METRICS, [*trace, "--trace-sample-ratio", "1"]),
        "metrics, traces and steps of 1 %": (
            _METRICS,
            [*trace, "--trace-sample-ratio", "0.01", "--trace-level", "2"],
        ),
    }


@contextmanager
def _collector() -> Iterator[str]:
    command = [sys.executable, "-m", "tests.bench", "tracing", "--collector"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait()


def _collect() -> int:
    """Be the collector until standard input ends."""
    from tests.telemetry.otlp_receiver import grpc_collector

    with grpc_collector() as collector:
        collector.take = lambda request: None  # type: ignore[method-assign]
        print(collector.endpoint, flush=True)
        sys.stdin.read()
    return 0


def _cpu(server: OwnServer) -> float:
    """Seconds of processor time of the server's own process, without its children."""
    times = psutil.Process(server.process.pid).cpu_times()
    return float(times.user + times.system)


class _Nowhere(SpanExporter):
    """Encodes spans for the wire, and drops them."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        encode_spans(spans).SerializeToString()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


def _record_one(timelines: Timelines, tracing: Tracing | None, number: int) -> None:
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    span = None
    if tracing is not None:
        route = "/v1/completions"
        span = tracing.serve(headers, method="POST", route=route, attributes={"url.path": route})
    timeline = timelines.open(f"cmpl-{number}", operation="text_completion", model="model")
    now = timeline.started
    timeline.finish(timeline.hops[0], now)
    for name in ("tokenize", "queue", "cache", "prefill", "decode", "detokenize", "stream"):
        hop = timeline.begin(name, now, 0, step=number)
        carrier = tracing.carrier(timeline, hop) if tracing is not None and name == "prefill" else None
        if carrier is not None and tracing is not None:
            tracing.worker_spans("worker-0", forward_spans((TracedRow(0, carrier),), now, now, device_seconds=0.1))
        timeline.finish(hop, now, tokens=64)
    timeline.mark("first_token", now, 0)
    timelines.close(timeline, Outcome(finish_reasons=("stop",)))
    if span is not None:
        span.end(200, "")


async def _record(requests: int, repeats: int) -> int:
    print(f"{cpu_name()}, {time.strftime('%Y-%m-%d')}")
    print("| traces | us a request |")
    print("|---|---|")
    for name, ratio in (("off", None), ("of 0 %", 0.0), ("of 1 %", 0.01), ("of 100 %", 1.0)):
        spent = []
        for _ in range(repeats):
            timelines, tracing = Timelines(), None
            if ratio is not None:
                export = TraceExport(TraceOptions(ratio=ratio), exporter=_Nowhere(), queue=32 * requests)
                tracing = Tracing(export.provider, export=export)
                timelines.listen(tracing)
            began = time.process_time()
            for number in range(requests):
                _record_one(timelines, tracing, number)
            if tracing is not None:
                await tracing.close()
                assert tracing.dropped == 0
            spent.append((time.process_time() - began) / requests * 1e6)
        print(f"| {name} | {statistics.median(spent):.0f} |")
    return 0


async def _bench(options: argparse.Namespace) -> int:
    point = Point(options.streams, options.input_len, options.output_len)
    measured: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    failed = 0
    with ExitStack() as stack:
        cases = _cases(stack.enter_context(_collector()))
        servers: dict[str, OwnServer] = {}
        for name, (_, extra) in cases.items():
            servers[name] = server = OwnServer(None, extra)
            stack.callback(server.stop)
            await server.wait_ready()
        client = Client(servers[_OFF].url)
        _, models = await client.json("GET", "/v1/models")
        await client.close()
        model = models["data"][0]["id"]  # type: ignore[index]
        print(f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores, {time.strftime('%Y-%m-%d')}; {model}; {point}")
        names = list(servers)
        for number in range(-1, options.rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                requests = point.concurrency * (1 if number < 0 else options.requests)
                before = _cpu(servers[name])
                result = await run_point(servers[name].url, model, point, requests, (300, 3000), number)
                failed += result["failed"]
                if number >= 0:
                    tokens = requests * point.output_len
                    cpu.setdefault(name, []).append((_cpu(servers[name]) - before) / tokens * 1e6)
                    measured.setdefault(name, []).append(result["tok/s"])
    print("| on | tok/s | compared with | share | shares of the rounds | CPU us a token |")
    print("|---|---|---|---|---|---|")
    for name, (base, _) in cases.items():
        shares = [own / other for own, other in zip(measured[name], measured[base], strict=True)]
        spread = f"{min(shares):.1%} to {max(shares):.1%}"
        middle = f"{statistics.median(measured[name]):.0f}"
        share, spent = statistics.median(shares), statistics.median(cpu[name])
        print(f"| {name} | {middle} | {base} | {share:.1%} | {spread} | {spent:.0f} |")
    if failed:
        print(f"{failed} requests failed")
    return 1 if failed else 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench tracing", description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--requests", type=int, default=4, help="requests a stream in each round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--record", action="store_true", help="measure the record of a request alone")
    parser.add_argument("--collector", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.record:
        return asyncio.run(_record(1000, options.rounds))
    return _collect() if options.collector else asyncio.run(_bench(options))
