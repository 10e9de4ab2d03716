"""Export of spans: an OpenTelemetry provider of the engine, whose batches are sent by a thread.

Nothing global is set. OpenTelemetry's environment variables (resource, headers, certificates, time limits) are
respected. The queue is bounded, and dropped spans are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import secrets
import threading
import uuid
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import msgspec
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, SamplingResult, TraceIdRatioBased
from opentelemetry.trace import Link, SpanKind, TraceState, get_current_span
from opentelemetry.util.types import Attributes

__all__ = ["TraceExport", "TraceOptions", "destination", "is_installed", "make_exporter"]

_QUEUE = 8192
"""Spans that may wait for the collector: a few megabytes."""

_BATCH = 512
_LETTING_GO = 1.0
_SERVICE = "troupe"
_GRPC, _HTTP = "grpc", "http/protobuf"


class TraceOptions(msgspec.Struct, frozen=True):
    """``endpoint`` and ``protocol``: None for the environment's values, or localhost:4317 by gRPC. ``ratio``: of the
    traces that begin here; None for the environment's value, or all. ``delay``: milliseconds until a partial batch is
    sent; None for OpenTelemetry's default."""

    endpoint: str | None = None
    protocol: str | None = None
    ratio: float | None = None
    delay: float | None = None


def is_installed() -> bool:
    """Whether the extra ``otlp`` is installed."""
    try:
        return all(
            importlib.util.find_spec(f"opentelemetry.exporter.otlp.proto.{name}.trace_exporter") is not None
            for name in ("grpc", "http")
        )
    except ModuleNotFoundError:
        return False


def destination(endpoint: str | None, protocol: str | None) -> tuple[str, str]:
    """The protocol and URL of the export. The default protocol is gRPC, unless the endpoint has a path or HTTP's port
    4318. Raises ValueError for an invalid endpoint."""
    variables = os.environ
    own = endpoint or variables.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    of_all_signals = None if own else variables.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    target = own or of_all_signals or "localhost:4317"
    try:
        parts = urlsplit(target if "://" in target else f"http://{target}")
        port, known = parts.port, parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        known = False
    if not known or any(character.isspace() for character in target):
        raise ValueError(f"{target!r} is no endpoint of a collector; give HOST:PORT or a URL with http or https")
    path = parts.path.rstrip("/")
    protocol = (
        protocol
        or variables.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        or variables.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or (_HTTP if port == 4318 or path else _GRPC)
    )
    if protocol == _GRPC:
        return _GRPC, f"{parts.scheme}://{parts.netloc}"
    # Over HTTP each signal has its own path below the endpoint.
    if of_all_signals or not path:
        path += "/v1/traces"
    return _HTTP, parts._replace(path=path).geturl()


def make_exporter(endpoint: str | None, protocol: str | None) -> SpanExporter:
    """An OTLP exporter to :func:`destination`."""
    protocol, url = destination(endpoint, protocol)
    if protocol == _GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=url)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=url)


class _Ids(IdGenerator):
    """From the system's randomness: a program that seeds ``random`` twice with one value must not create equal ids."""

    def generate_span_id(self) -> int:
        return secrets.randbits(64) or 1

    def generate_trace_id(self) -> int:
        return secrets.randbits(128) or 1


class _Linked(Sampler):
    """Samples spans that are linked to a sampled trace, and leaves others to another sampler: a step is traced with its
    requests."""

    def __init__(self, rest: Sampler) -> None:
        self._rest = rest

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        if not get_current_span(parent_context).get_span_context().is_valid and any(
            link.context.trace_flags.sampled for link in links or ()
        ):
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes, trace_state)
        return self._rest.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        return f"Linked({self._rest.get_description()})"


class _Counting(SpanExporter):
    """Counts exported and dropped spans. Called in the processor's thread only."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self.taken = 0  # from the queue
        self.sent = 0
        self.lost = 0
        self.closed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            if not self.closed:
                result = self._inner.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self.sent += len(spans)
            else:
                self.lost += len(spans)
        return result

    def shutdown(self) -> None:
        if not self.closed:
            self.closed = True
            self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._inner.force_flush(timeout_millis)


class _BoundedProcessor(BatchSpanProcessor):
    """Drops and counts new spans while the queue is full, instead of removing queued ones. ``on_end`` is called in the
    engine's loop only."""

    def __init__(self, exporter: _Counting, *, queue: int, delay: float | None) -> None:
        super().__init__(
            exporter, max_queue_size=queue, max_export_batch_size=min(_BATCH, queue), schedule_delay_millis=delay
        )
        self._counting = exporter
        self._limit = queue
        self.queued = 0  # in total
        self.dropped = 0

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self.queued - self._counting.taken >= self._limit or self._counting.closed:
            self.dropped += 1
            return
        self.queued += 1
        super().on_end(span)


class TraceExport:
    """The provider, its queue and its counts. Create it in the event loop; :meth:`close` ends its thread."""

    def __init__(self, options: TraceOptions, *, exporter: SpanExporter | None = None, queue: int = _QUEUE) -> None:
        self._closed = False
        self._exporter = _Counting(exporter or make_exporter(options.endpoint, options.protocol))
        self._processor = _BoundedProcessor(self._exporter, queue=queue, delay=options.delay)
        self.resource = _resource()
        sampler = None if options.ratio is None else ParentBased(TraceIdRatioBased(options.ratio))
        self.provider = TracerProvider(
            sampler=sampler, resource=self.resource, shutdown_on_exit=False, id_generator=_Ids()
        )
        # The provider has read the environment's sampling.
        self.provider.sampler = _Linked(self.provider.sampler)
        self.provider.add_span_processor(self._processor)

    @property
    def dropped(self) -> int:
        """Spans that the queue or the collector did not accept; after the close, all that have not arrived."""
        lost = self._processor.queued - self._exporter.sent if self._closed else self._exporter.lost
        return self._processor.dropped + lost

    @property
    def exported(self) -> int:
        """Spans that the collector has accepted."""
        return self._exporter.sent

    def emit(self, span: ReadableSpan) -> None:
        """Queue a span that was created elsewhere."""
        self._processor.on_end(span)

    async def close(self, timeout: float) -> None:
        """Send the queued spans for at most ``timeout`` seconds; the rest is dropped and counted."""
        flushed = _beside(self._processor.shutdown)
        if not await _within(timeout, flushed):
            _beside(self._exporter.shutdown)  # gives up a collector that does not answer
            await _within(_LETTING_GO, flushed)
        self._closed = True


def _beside(work: Callable[[], None]) -> asyncio.Event:
    """Run ``work`` in a thread that is not awaited; the event is set at its end."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        try:
            work()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits any more
                loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="troupe-trace-close", daemon=True).start()
    return done


async def _within(timeout: float, done: asyncio.Event) -> bool:
    try:
        async with asyncio.timeout(timeout):
            await done.wait()
    except TimeoutError:
        return False
    return True


def _resource() -> Resource:
    """The environment's values, and those that it leaves open."""
    result = Resource.create()
    missing: dict[str, str | int] = {"process.pid": os.getpid()}
    if str(result.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
        missing["service.name"] = _SERVICE
    if "service.instance.id" not in result.attributes:
        missing["service.instance.id"] = str(uuid.uuid4())
    return result.merge(Resource(missing))
