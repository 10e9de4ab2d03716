"""What recording one request costs: processor time of its HTTP span, its timeline and all its spans, without a server.

    python -m tests.bench recording

A request has one choice and one prefill chunk, whose span from the worker is made here too. What is sampled is encoded
for OTLP and then dropped. What metrics and traces cost under load: ``python -m tests.bench observability``.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from telemetry.timeline import Outcome, Timelines
from telemetry.traces.export import TraceExport, TraceOptions
from telemetry.traces.tracing import Tracing
from telemetry.traces.worker_spans import TracedRow, forward_spans
from tests.bench._options import command_line
from tests.bench._record import record
from tests.bench.serving import cpu_name

__all__ = ["main"]


class _Nowhere(SpanExporter):
    """An exporter that encodes spans and drops them."""

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
        record(name, "a request", spent, "us")
    return 0


def main(argv: list[str]) -> int:
    parser = command_line(__name__, __doc__, records=True)
    parser.add_argument("--requests", type=int, default=1000, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=7, help="measurements; their median counts")
    options = parser.parse_args(argv)
    return asyncio.run(_record(options.requests, options.repeats))
