"""What spans meet on their way out: full queues, collectors that are not there, providers of other services."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import get_current_span

from actors.engine.engine import Engine
from actors.engine.traces import check_tracing, start_tracing
from actors.options import ArgumentError, Arguments
from actors.protocol.requests import SamplingParams
from actors.runtime import current_traceparent
from telemetry.timeline import Outcome, RequestTimeline, Timelines
from telemetry.traces.export import TraceExport, TraceOptions, make_exporter
from telemetry.traces.tracing import Tracing
from telemetry.traces.worker_spans import STEP_ROW, TracedRow, forward_spans
from tests.kits import engines
from tests.kits.waiting import PATIENCE

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

pytestmark = pytest.mark.asyncio(loop_scope="module")

small_engine = partial(engines.small_engine, max_running_requests=4, max_total_tokens=1024, standby_worker=False)


class Blocked(SpanExporter):
    """A collector that takes nothing until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun = threading.Event()
        self.taken: list[str] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.begun.set()
        self.open.wait(PATIENCE)
        self.taken += [span.name for span in spans]
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.open.set()


async def test_a_full_queue_drops_and_counts_and_never_waits() -> None:
    exporter = Blocked()
    export = TraceExport(TraceOptions(ratio=1.0, delay=10), exporter=exporter, queue=4)
    tracer = export.provider.get_tracer("t")
    tracer.start_span("first").end()
    assert await asyncio.to_thread(exporter.begun.wait, PATIENCE)
    for number in range(10):
        tracer.start_span(f"span-{number}").end()
    assert export.dropped == 6  # four wait, the first is under way
    exporter.open.set()
    await export.close(PATIENCE)
    assert exporter.taken == ["first", *[f"span-{number}" for number in range(4)]]
    assert (export.exported, export.dropped) == (5, 6)
    tracer.start_span("late").end()
    assert export.dropped == 7


async def test_a_close_does_not_wait_for_a_collector_that_hangs() -> None:
    exporter = Blocked()
    export = TraceExport(TraceOptions(ratio=1.0, delay=10), exporter=exporter)
    export.provider.get_tracer("t").start_span("span").end()
    async with asyncio.timeout(PATIENCE):
        await export.close(0.05)


async def test_a_collector_that_is_not_there_costs_the_spans_only(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telemetry.traces.tracing._CLOSE_TIMEOUT", 0.2)
    engine = small_engine(tiny_model, enable_trace=True, oltp_traces_endpoint="http://127.0.0.1:9/v1/traces")
    async with engine:
        for _ in range(2):
            async for _ in engine.generate("one two", GREEDY):
                pass
    assert engine.tracing is not None
    assert engine.tracing.exported == 0
    assert engine.tracing.dropped >= 2 * 9


async def test_a_ratio_decides_for_traces_that_begin_here() -> None:
    for ratio, expected in ((0.0, 1), (1.0, 2)):
        exporter = InMemorySpanExporter()
        export = TraceExport(TraceOptions(ratio=ratio), exporter=exporter)
        timelines = Timelines()
        timelines.listen(Tracing(export.provider, export=export))
        ours = timelines.open("a", operation="chat", model="m")
        theirs = timelines.open("b", operation="chat", model="m", traceparent=CALLER)
        broken = timelines.open("c", operation="chat", model="m", traceparent="00-nonsense")
        assert (ours.trace is None) == (ratio == 0.0) == (broken.trace is None)
        assert ours.traceparent is not None
        assert ours.traceparent.endswith("-00" if ratio == 0.0 else "-01")
        for timeline in (ours, theirs):
            timelines.close(timeline, Outcome())
        await export.close(PATIENCE)
        spans = [span for span in exporter.get_finished_spans() if span.name == "chat m"]
        assert len(spans) == expected


async def test_arguments_set_the_endpoint_and_the_sample_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    exports: list[tuple[str | None, str | None]] = []

    def make(endpoint: str | None, protocol: str | None) -> SpanExporter:
        exports.append((endpoint, protocol))
        return InMemorySpanExporter()

    monkeypatch.setattr("telemetry.traces.export.make_exporter", make)
    for ratio in (0.0, 1.0):
        reported = Arguments(
            model_path="m",
            enable_trace=True,
            trace_level=3,
            oltp_traces_endpoint="collector:4318",
            otlp_traces_protocol="grpc",
            trace_sample_ratio=ratio,
        )
        tracing = start_tracing(reported, None)
        assert tracing is not None
        assert tracing.level == 3
        timelines = Timelines()
        timelines.listen(tracing)
        assert (timelines.open("a", operation="chat", model="m").trace is not None) == (ratio == 1.0)
        await tracing.close()
    assert exports == [("collector:4318", "grpc")] * 2


async def test_handlers_are_traced_whatever_other_trace_flags_are_set() -> None:
    """As providers of new versions set them: 02 says that the trace's id is random."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider, level=3)
    for flags in ("00", "01", "02", "03"):
        tracing.handled("cache", f"M{flags}", f"{CALLER[:-2]}{flags}", wait=0.0, duration=0.0, error=None)
    assert [span.name for span in exporter.get_finished_spans()] == ["cache M01", "cache M03"]


async def test_environment_variables_are_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    export = TraceExport(TraceOptions(), exporter=InMemorySpanExporter())
    assert export.resource.attributes["service.name"] == "mine"
    assert export.resource.attributes["deployment.environment.name"] == "test"
    assert not export.provider.get_tracer("t").start_span("a").is_recording()
    await export.close(PATIENCE)
    monkeypatch.delenv("OTEL_SERVICE_NAME")
    monkeypatch.delenv("OTEL_TRACES_SAMPLER")
    export = TraceExport(TraceOptions(), exporter=InMemorySpanExporter())
    assert export.resource.attributes["service.name"] == "troupe"
    assert export.provider.get_tracer("t").start_span("a").is_recording()
    await export.close(PATIENCE)


@pytest.mark.parametrize(
    ("endpoint", "protocol", "environment", "kind", "goes_to"),
    [
        (None, None, {}, "grpc", "localhost:4317"),
        ("collector:4317", None, {}, "grpc", "collector:4317"),
        ("collector:4318", None, {}, "http", "http://collector:4318/v1/traces"),
        ("https://a.example/otel/v1/traces", None, {}, "http", "https://a.example/otel/v1/traces"),
        ("collector:9999", "http/protobuf", {}, "http", "http://collector:9999/v1/traces"),
        ("collector:4318", "grpc", {}, "grpc", "collector:4318"),
        (None, None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a:1"}, "grpc", "a:1"),
        (None, None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318"}, "http", "http://a:4318/v1/traces"),
        (None, None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://a/otlp/"}, "http", "https://a/otlp/v1/traces"),
        (None, "http/protobuf", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:80"}, "http", "http://a:80/v1/traces"),
        ("a:1", None, {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http", "http://a:1/v1/traces"),
    ],
)
async def test_the_endpoint_selects_the_protocol(
    monkeypatch: pytest.MonkeyPatch,
    endpoint: str | None,
    protocol: str | None,
    environment: dict[str, str],
    kind: str,
    goes_to: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    exporter: Any = make_exporter(endpoint, protocol)
    assert f".{kind}." in type(exporter).__module__
    assert exporter._endpoint == goes_to
    exporter.shutdown()


# -- steps and workers


class Steps:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.export = TraceExport(TraceOptions(ratio=0.0), exporter=self.exporter)
        self.tracing = Tracing(self.export.provider, level=2, export=self.export)
        self.timelines = Timelines()
        self.timelines.listen(self.tracing)

    def request(self, name: str, traceparent: str | None) -> RequestTimeline:
        return self.timelines.open(name, operation="chat", model="m", traceparent=traceparent)

    async def spans(self) -> dict[str, ReadableSpan]:
        await self.export.close(PATIENCE)
        return {span.name: span for span in self.exporter.get_finished_spans()}


async def test_a_step_links_the_sampled_ones_of_its_requests_only() -> None:
    steps = Steps()
    sampled, other = steps.request("a", CALLER), steps.request("b", None)
    assert steps.tracing.step_began(1, [other], 1.0, {}) is None
    assert steps.tracing.carrier(other, other.hops[0]) is None
    trace = steps.tracing.step_began(2, [sampled, other], 1.0, {"tokens": 3})
    assert trace is not None
    (reported,) = forward_spans((TracedRow(STEP_ROW, trace),), 1.5, 1.75, device_seconds=0.25)
    steps.tracing.worker_spans("worker-1", [reported])
    steps.tracing.step_ended(2, 2.0, device_seconds=0.25)
    found = await steps.spans()
    step, forward = found["step"], found["forward"]
    assert [link.context.trace_id for link in step.links] == [int(CALLER.split("-")[1], 16)]
    assert step.context is not None
    assert forward.parent is not None
    assert forward.parent.span_id == step.context.span_id
    assert forward.resource.attributes["service.instance.id"] == "worker-1"
    assert (step.attributes or {})["troupe.tokens"] == 3
    assert abs((step.end_time or 0) - (step.start_time or 0) - 10**9) < 1000


async def test_a_step_without_an_answer_is_an_error() -> None:
    steps = Steps()
    steps.tracing.step_began(3, [steps.request("a", CALLER)], 1.0, {})
    steps.tracing.steps_lost(1.5, "killed by SIGKILL")
    step = (await steps.spans())["step"]
    assert not step.status.is_ok
    assert step.status.description == "killed by SIGKILL"


# -- other services


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embedded(tiny_model: Path, exporter: InMemorySpanExporter) -> AsyncIterator[tuple[Engine, TracerProvider]]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with small_engine(tiny_model, tracer_provider=provider) as engine:
        yield engine, provider
    provider.get_tracer("service").start_span("after").end()
    assert exporter.get_finished_spans()[-1].name == "after"  # the service's provider is not the engine's to close


async def test_an_embedding_service_has_the_spans_below_its_own(
    embedded: tuple[Engine, TracerProvider], exporter: InMemorySpanExporter
) -> None:
    engine, provider = embedded
    with provider.get_tracer("service").start_as_current_span("work") as work:
        async for _ in engine.generate("one two", GREEDY):
            pass
    spans = {span.name: span for span in exporter.get_finished_spans()}
    request = spans[f"text_completion {engine.model_name}"]
    assert request.parent is not None
    assert request.parent.span_id == work.get_span_context().span_id
    prefill, forward = spans["prefill"], spans["forward"]
    assert prefill.context is not None
    assert forward.parent is not None
    assert forward.parent.span_id == prefill.context.span_id
    assert (forward.attributes or {})["service.instance.id"] == "worker-0"
    assert engine.tracing is not None
    assert engine.tracing.dropped == 0


async def test_without_a_span_of_its_own_a_service_may_name_the_parent(
    embedded: tuple[Engine, TracerProvider], exporter: InMemorySpanExporter
) -> None:
    engine, _ = embedded
    exporter.clear()
    token = current_traceparent.set(CALLER)
    try:
        stream = engine.generate("one two", GREEDY)
    finally:
        current_traceparent.reset(token)
    async for _ in stream:
        pass
    (request,) = [span for span in exporter.get_finished_spans() if span.name.startswith("text_completion")]
    assert request.parent is not None
    assert f"{request.parent.span_id:016x}" == CALLER.split("-")[2]


async def test_an_exchange_is_a_child_of_the_embedding_service_or_the_client() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider)

    def exchange() -> str:
        span = tracing.serve([(b"TraceParent", CALLER.encode())], method="POST", route="/x", attributes={})
        assert span is not None
        assert get_current_span().is_recording()
        span.end(503, "")
        done = exporter.get_finished_spans()[-1]
        assert (done.attributes or {})["error.type"] == "503"
        assert done.parent is not None
        return f"{done.parent.span_id:016x}"

    assert exchange() == CALLER.split("-")[2]
    with provider.get_tracer("service").start_as_current_span("outer") as outer:
        assert exchange() == f"{outer.get_span_context().span_id:016x}"
    assert not get_current_span().is_recording()
    tracing.level = 0
    assert tracing.serve([], method="POST", route="/x", attributes={}) is None


# -- arguments


async def test_traces_that_cannot_be_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="needs enable_trace"):
        Arguments(model_path="m", oltp_traces_endpoint="a:1")
    with pytest.raises(ArgumentError, match="trace_level needs"):
        Engine(model="m", trace_level=2)
    with pytest.raises(ArgumentError, match="tracer_provider"):
        Engine(model="m", enable_trace=True, tracer_provider=TracerProvider(shutdown_on_exit=False))
    for endpoint in ("collector :4317", "collector:99999", "collector:x", "http://[", "ftp://a:1", "http://"):
        with pytest.raises(ArgumentError, match="is no endpoint of a collector; give HOST:PORT"):
            Engine(model="m", enable_trace=True, oltp_traces_endpoint=endpoint)
    monkeypatch.setattr("telemetry.traces.export.is_installed", lambda: False)
    with pytest.raises(ArgumentError, match=r"troupe-llm\[otlp\]"):
        Engine(model="m", enable_trace=True)
    check_tracing(Arguments(model_path="m"), None)


async def test_without_traces_nothing_of_opentelemetry_s_sdk_is_imported() -> None:
    wanted = "[name for name in ('grpc', 'opentelemetry.sdk') if name in sys.modules]"
    code = f"import sys, actors.engine.engine, app.application; print({wanted})"
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("ratio", [0.0, 1.0])
async def test_an_ignored_traceparent_is_linked_and_decides_nothing(ratio: float) -> None:
    exporter = InMemorySpanExporter()
    export = TraceExport(TraceOptions(ratio=ratio), exporter=exporter)
    tracing = Tracing(export.provider, export=export, ignore_client_parent=True)
    for flags in ("00", "01"):
        headers = [(b"traceparent", (CALLER[:-2] + flags).encode())]
        span = tracing.serve(headers, method="POST", route="/generate", attributes={})
        assert span is not None
        assert span.traceparent.split("-")[1] != CALLER.split("-")[1]
        assert span.traceparent.endswith("-01" if ratio else "-00")
        span.end(200, "")
    await export.close(PATIENCE)
    links = [link.context.span_id for span in exporter.get_finished_spans() for link in span.links]
    assert links == [int(CALLER.split("-")[2], 16)] * (2 if ratio else 0)


async def test_the_argument_selects_whose_traceparent_decides(tiny_model: Path) -> None:
    for ignored, ending in ((False, "-01"), (True, "-00")):
        given = Arguments(
            model_path=str(tiny_model), enable_trace=True, trace_sample_ratio=0.0, ignore_client_traceparent=ignored
        )
        tracing = start_tracing(given, None)
        assert tracing is not None
        span = tracing.serve([(b"traceparent", CALLER.encode())], method="POST", route="/generate", attributes={})
        assert span is not None
        span.end(200, "")
        assert span.traceparent.endswith(ending)
        await tracing.close()
