"""Traces: one per request, its hops as spans, from the client's headers to the worker's device and back.

    POST /v1/chat/completions                      the HTTP exchange, child of the client's span
      chat MODEL                                   the request; marks are its events
        admission, tokenize, queue, cache          a span a hop, with the hop's own times
        prefill -> forward                         a span a chunk; ``forward`` comes from the worker's process
        decode, detokenize, stream

At level 0 nothing new is traced; level 1 is shown above. At level 2 each step has its own trace, linked to its
requests: a step has many, so it cannot be the child of one. ``spec_draft`` and ``spec_verify`` stand beside its
``forward`` if it verified draft tokens. At level 3 the handlers of actors have spans too. Names follow OpenTelemetry's
GenAI conventions; other attributes begin with ``troupe.``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TracerProvider,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from telemetry.timeline import Hop, Mark, RequestTimeline, Value
from telemetry.traces.worker_spans import WorkerSpan

if TYPE_CHECKING:
    from telemetry.traces.export import TraceExport

__all__ = ["ServerSpan", "Tracing"]

PROVIDER = "troupe"

_SCOPE = "troupe"
_CLOSE_TIMEOUT = 3.0
_SAMPLED = tuple("13579bdf")  # the flags of a sampled trace end in 1; higher bits have other meanings
_PROPAGATOR = TraceContextTextMapPropagator()


class _Traced(msgspec.Struct, frozen=True, eq=False):
    """The state of a traced timeline. ``base``: nanoseconds between the monotonic clock and 1970."""

    span: Span
    inside: Context
    base: int


class _Step(msgspec.Struct, frozen=True, eq=False):
    span: Span
    base: int


class Tracing:
    """The traces of one engine: a listener of its timelines.

    ``export``: the engine's own export; None with an embedding service's provider. ``ignore_client_parent``: link a
    client's span instead of making it the parent, so that its sampling decision does not count. Everything is called in
    the engine's event loop.
    """

    def __init__(
        self,
        provider: TracerProvider,
        *,
        level: int = 1,
        export: TraceExport | None = None,
        ignore_client_parent: bool = False,
    ) -> None:
        self.level = level
        self._ignore_client_parent = ignore_client_parent
        self._tracer = provider.get_tracer(_SCOPE)
        self._export = export
        self._scope = InstrumentationScope(_SCOPE)
        self._steps: dict[int, _Step] = {}
        self._workers: dict[tuple[str, int], Resource] = {}

    @property
    def dropped(self) -> int:
        """Spans that never reached the collector."""
        return 0 if self._export is None else self._export.dropped

    @property
    def exported(self) -> int:
        """Spans that the collector has accepted."""
        return 0 if self._export is None else self._export.exported

    async def close(self) -> None:
        """Send queued spans, for a few seconds at most. An embedding service's provider is not closed."""
        if self._export is not None:
            await self._export.close(_CLOSE_TIMEOUT)

    # -- HTTP

    def serve(
        self,
        headers: Iterable[tuple[bytes, bytes]],
        *,
        method: str,
        route: str,
        attributes: Mapping[str, str | int],
    ) -> ServerSpan | None:
        """The span of an HTTP exchange, which is current until :meth:`ServerSpan.end`; None while nothing is traced.
        The client's ``traceparent`` and ``tracestate`` are read; its baggage is not."""
        if self.level < 1:
            return None
        carrier: dict[str, str] = {}
        for name, value in headers:
            lowered = name.lower()
            if lowered in (b"traceparent", b"tracestate"):
                key = lowered.decode()
                carrier[key] = (
                    f"{carrier[key]},{value.decode('latin-1')}" if key in carrier else value.decode("latin-1")
                )
        around = otel_context.get_current()  # valid where a surrounding service has read the headers
        by_service = get_current_span(around).get_span_context().is_valid
        client = around if by_service else _PROPAGATOR.extract(carrier, around)
        ignored = self._ignore_client_parent and not by_service
        span = self._tracer.start_span(
            f"{method} {route}",
            around if ignored else client,
            SpanKind.SERVER,
            {"http.request.method": method, "http.route": route, **attributes},
        )
        linked = get_current_span(client).get_span_context()
        if ignored and linked.is_valid:
            span.add_link(linked)  # after the start: a sampler may read links
        return ServerSpan(span)

    # -- requests

    def began(self, timeline: RequestTimeline) -> None:
        if self.level < 1:
            return
        parent = otel_context.get_current()
        if not get_current_span(parent).get_span_context().is_valid:
            parent = _context_of(timeline.traceparent)
        base = int(timeline.started_unix * 1e9) - int(timeline.started * 1e9)
        span = self._tracer.start_span(
            f"{timeline.operation} {timeline.model}",
            parent,
            SpanKind.INTERNAL,
            {
                "gen_ai.operation.name": timeline.operation,
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.request.model": timeline.model,
            },
            start_time=base + int(timeline.started * 1e9),
        )
        timeline.traceparent = _traceparent(span.get_span_context())
        if span.is_recording():
            timeline.trace = _Traced(span, set_span_in_context(span, Context()), base)

    def hop_ended(self, timeline: RequestTimeline, hop: Hop) -> None:
        traced = timeline.trace
        if not isinstance(traced, _Traced) or hop.end is None:
            return
        span = hop.trace if isinstance(hop.trace, Span) else self._start_hop(traced, hop)
        span.set_attributes(_named(hop.attributes))
        span.end(traced.base + int(hop.end * 1e9))

    def marked(self, timeline: RequestTimeline, mark: Mark) -> None:
        traced = timeline.trace
        if isinstance(traced, _Traced):
            values = dict(mark.attributes) if mark.choice is None else {"choice": mark.choice, **mark.attributes}
            traced.span.add_event(mark.name, _named(values), traced.base + int(mark.at * 1e9))

    def ended(self, timeline: RequestTimeline) -> None:
        traced, outcome = timeline.trace, timeline.outcome
        if not isinstance(traced, _Traced) or outcome is None or timeline.end is None:
            return
        span = traced.span
        span.set_attributes(timeline.request)
        if outcome.finish_reasons:  # otherwise it was refused and has no response
            span.set_attributes(
                {
                    "gen_ai.response.id": timeline.request_id,
                    "gen_ai.response.model": timeline.model,
                    "gen_ai.response.finish_reasons": outcome.finish_reasons,
                    "gen_ai.usage.input_tokens": timeline.prompt_tokens,
                    "gen_ai.usage.output_tokens": timeline.output_tokens,
                    "gen_ai.usage.cache_read.input_tokens": timeline.cached_tokens,
                }
            )
        first = min((mark.at for mark in timeline.marks if mark.name == "first_token"), default=None)
        if first is not None:
            span.set_attribute("gen_ai.response.time_to_first_chunk", first - timeline.started)
        if timeline.label is not None:
            span.set_attribute("troupe.request.label", timeline.label)
        if outcome.error_type:
            span.set_attribute("error.type", outcome.error_type)
            span.set_status(Status(StatusCode.ERROR, outcome.message or None))
        span.end(traced.base + int(timeline.end * 1e9))

    def _start_hop(self, traced: _Traced, hop: Hop) -> Span:
        values = {} if hop.choice is None else {"troupe.choice": hop.choice}
        return self._tracer.start_span(
            hop.name, traced.inside, attributes=values, start_time=_at(traced.base, hop.start)
        )

    # -- steps and workers

    def carrier(self, timeline: RequestTimeline, hop: Hop) -> str | None:
        """The traceparent of an open hop, for spans of another process below it; None if it is not sampled."""
        traced = timeline.trace
        if not isinstance(traced, _Traced):
            return None
        span = self._start_hop(traced, hop)
        hop.trace = span
        return _traceparent(span.get_span_context())

    def step_began(
        self, number: int, timelines: Iterable[RequestTimeline], at: float, attributes: Mapping[str, int]
    ) -> str | None:
        """Record that a step was sent. From level 2 on it has a span if one of its requests is sampled; returns its
        traceparent."""
        if self.level < 2:
            return None
        links = [
            Link(timeline.trace.span.get_span_context())
            for timeline in timelines
            if isinstance(timeline.trace, _Traced)
        ]
        if not links:
            return None
        base = _now_base()
        values = {"troupe.step": number, **_named(attributes)}
        span = self._tracer.start_span("step", Context(), attributes=values, links=links, start_time=_at(base, at))
        if not span.is_recording():
            return None
        self._steps[number] = _Step(span, base)
        return _traceparent(span.get_span_context())

    def step_ended(self, number: int, at: float, *, device_seconds: float | None = None, error: str = "") -> None:
        """Record a step's result, or with ``error`` that it is lost."""
        step = self._steps.pop(number, None)
        if step is None:
            return
        if device_seconds is not None:
            step.span.set_attribute("troupe.device_seconds", device_seconds)
        if error:
            step.span.set_attribute("error.type", "worker_died")
            step.span.set_status(Status(StatusCode.ERROR, error))
        step.span.end(_at(step.base, at))

    def steps_lost(self, at: float, error: str) -> None:
        """Record that all open steps are lost."""
        for number in list(self._steps):
            self.step_ended(number, at, error=error)

    def worker_spans(self, worker: str, spans: Sequence[WorkerSpan]) -> None:
        """Add spans that a worker's process has recorded."""
        base = _now_base()
        for item in spans:
            start, end = _at(base, item.start), _at(base, item.end)
            own = _span_context(item.traceparent)
            parent = SpanContext(own.trace_id, int(item.parent, 16), True, own.trace_flags)
            if self._export is None:
                # another provider creates its own spans, with its own resource
                inside = set_span_in_context(NonRecordingSpan(parent), Context())
                attributes = {"service.instance.id": worker, "process.pid": item.pid, **_named(item.attributes)}
                self._tracer.start_span(item.name, inside, attributes=attributes, start_time=start).end(end)
                continue
            self._export.emit(
                ReadableSpan(
                    name=item.name,
                    context=own,
                    parent=parent,
                    resource=self._worker_resource(worker, item.pid),
                    attributes=_named(item.attributes),
                    kind=SpanKind.INTERNAL,
                    start_time=start,
                    end_time=end,
                    instrumentation_scope=self._scope,
                )
            )

    def _worker_resource(self, worker: str, pid: int) -> Resource:
        result = self._workers.get((worker, pid))
        if result is None:
            assert self._export is not None
            for stale in [key for key in self._workers if key[0] == worker]:
                del self._workers[stale]
            own = Resource({"service.instance.id": worker, "process.pid": pid})
            result = self._workers[worker, pid] = self._export.resource.merge(own)
        return result

    # -- actors

    def handled(
        self,
        actor: str,
        message: str,
        traceparent: str | None,
        *,
        wait: float,
        duration: float,
        error: BaseException | None,
    ) -> None:
        """Record a handled message; from level 3 on as a span, if its sender is sampled."""
        if self.level < 3 or traceparent is None or traceparent[-1:] not in _SAMPLED:
            return
        now = time.time_ns()
        span = self._tracer.start_span(
            f"{actor} {message}",
            _context_of(traceparent),
            attributes={"troupe.actor": actor, "troupe.message": message, "troupe.wait": wait},
            start_time=now - int(duration * 1e9),
        )
        if error is not None:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(Status(StatusCode.ERROR, str(error)))
        span.end(now)


class ServerSpan:
    """A running HTTP exchange. Its span is OpenTelemetry's current one in this task until it ends."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self.traceparent = _traceparent(span.get_span_context())
        self._token = otel_context.attach(set_span_in_context(span))

    def end(self, status: int, broken: str) -> None:
        """End the span after the last byte. ``status``: 0 if nothing was sent; ``broken``: why the response is
        incomplete."""
        otel_context.detach(self._token)
        span = self._span
        if status:
            span.set_attribute("http.response.status_code", status)
        error = broken or (str(status) if status >= 500 else "")
        if error:  # a status below 500 is no server error
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR))
        span.end()


def _named(attributes: Mapping[str, Value]) -> dict[str, Value]:
    return {f"troupe.{name}": value for name, value in attributes.items()}


def _at(base: int, moment: float) -> int:
    """A monotonic moment in seconds as nanoseconds since 1970."""
    return base + int(moment * 1e9)


def _now_base() -> int:
    return time.time_ns() - time.monotonic_ns()


def _traceparent(context: SpanContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _span_context(traceparent: str) -> SpanContext:
    """Parse a traceparent that was created here."""
    _, trace, span, flags = traceparent.split("-")
    return SpanContext(int(trace, 16), int(span, 16), False, TraceFlags(int(flags, 16)))


def _context_of(traceparent: str | None) -> Context:
    """Malformed values mean: no parent."""
    return _PROPAGATOR.extract({"traceparent": traceparent} if traceparent else {}, Context())
