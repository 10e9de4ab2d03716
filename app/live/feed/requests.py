"""Requests for the feed, from their timelines: times and counts, never text of a request."""

from __future__ import annotations

import hashlib
import itertools
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping

from app.live.feed.answers import HopView, MarkView, RequestView, Span, Waterfall
from app.server.auth import may_access
from telemetry.metrics.options import ADAPTER
from telemetry.timeline import RequestTimeline, Timelines, Value

__all__ = ["RequestViews"]

SHOWN_SECONDS = 30.0
"""Seconds that an ended request is shown."""

MAX_SHOWN = 64
"""Most live requests of a frame, and most ended ones."""

_SPANS = frozenset({"tokenize", "queue", "prefill", "decode"})
_MAX_SPANS = 48

_WORDS = frozenset({"worker", "reason", "error.type", ADAPTER})
"""Attributes with text of the server. Other texts may quote a client."""

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-")


class RequestViews:
    """The views of one engine's requests, under names that only the feed knows."""

    def __init__(self, timelines: Timelines) -> None:
        self._timelines = timelines
        self._secret = secrets.token_bytes(16)
        self._shown: dict[str, dict[str, tuple[object, ...]]] = {}  # by tenant

    def all(self, now: float, tenant: str = "") -> list[RequestView]:
        """The requests that ``tenant`` may see: live ones in order of arrival, then ended ones, latest first."""
        return [self._view(timeline) for timeline in self._on_stage(now, tenant)]

    def changed(self, now: float, tenant: str = "") -> list[RequestView]:
        """The requests of :meth:`all` that changed since the last call for ``tenant``."""
        before, shown, views = self._shown.get(tenant, {}), {}, []
        for timeline in self._on_stage(now, tenant):
            key = timeline.request_id
            shown[key] = state = _state(timeline)
            if before.get(key) != state:
                views.append(self._view(timeline))
        self._shown[tenant] = shown
        return views

    def waterfall(self, name: str, tenant: str = "") -> Waterfall | None:
        """One request in full, by the feed's handle or the id that the client received.

        None if it is unknown or ``tenant`` may not see it.
        """
        timeline = self._timelines.find(name)
        if timeline is None:
            everyone = itertools.chain(self._timelines.live(), self._timelines.recent)
            timeline = next((result for result in everyone if self._handle(result.request_id) == name), None)
        if timeline is None or not may_access(tenant, timeline.tenant):
            return None
        return self._in_full(timeline)

    def _on_stage(self, now: float, tenant: str) -> Iterator[RequestTimeline]:
        def seen(timelines: Iterable[RequestTimeline]) -> Iterator[RequestTimeline]:
            return itertools.islice((result for result in timelines if may_access(tenant, result.tenant)), MAX_SHOWN)

        yield from seen(self._timelines.live())
        for timeline in seen(reversed(self._timelines.recent)):
            if timeline.end is None or now - timeline.end > SHOWN_SECONDS:
                return
            yield timeline

    def _handle(self, request_id: str) -> str:
        return hashlib.blake2s(request_id.encode(), key=self._secret, digest_size=5).hexdigest()

    def _view(self, timeline: RequestTimeline) -> RequestView:
        spans = [
            Span(hop.name, round(hop.start, 4), None if hop.end is None else round(hop.end, 4), hop.choice or 0)
            for hop in timeline.hops
            if hop.name in _SPANS
        ]
        return RequestView(
            handle=self._handle(timeline.request_id),
            operation=timeline.operation,
            start=round(timeline.started, 4),
            end=None if timeline.end is None else round(timeline.end, 4),
            prompt_tokens=timeline.prompt_tokens,
            cached_tokens=timeline.cached_tokens,
            output_tokens=timeline.output_tokens,
            error=timeline.outcome.error_type if timeline.outcome is not None else "",
            adapter=str(timeline.request.get(ADAPTER, "")),
            spans=spans[-_MAX_SPANS:],
            marks=[(mark.name, round(mark.at, 4)) for mark in timeline.marks[-_MAX_SPANS:]],
        )

    def _in_full(self, timeline: RequestTimeline) -> Waterfall:
        start, outcome = timeline.started, timeline.outcome
        end = time.monotonic() if timeline.end is None else timeline.end
        trace = _TRACEPARENT.match(timeline.traceparent or "")
        return Waterfall(
            handle=self._handle(timeline.request_id),
            operation=timeline.operation,
            model=timeline.model,
            started_unix=timeline.started_unix,
            elapsed=end - start,
            duration=None if timeline.end is None else end - start,
            trace_id=trace.group(1) if trace else None,
            prompt_tokens=timeline.prompt_tokens,
            cached_tokens=timeline.cached_tokens,
            output_tokens=timeline.output_tokens,
            finish_reasons=list(outcome.finish_reasons) if outcome is not None else [],
            error=outcome.error_type if outcome is not None else "",
            request=_visible(timeline.request),
            hops=[
                HopView(
                    name=hop.name,
                    start=hop.start - start,
                    end=None if hop.end is None else hop.end - start,
                    choice=hop.choice,
                    attributes=_visible(hop.attributes),
                )
                for hop in timeline.hops
            ],
            marks=[
                MarkView(name=mark.name, at=mark.at - start, choice=mark.choice, attributes=_visible(mark.attributes))
                for mark in timeline.marks
            ],
        )


def _state(timeline: RequestTimeline) -> tuple[object, ...]:
    """A value that changes when the view of the timeline changes."""
    open_hops = sum(hop.end is None for hop in timeline.hops)
    return (len(timeline.hops), open_hops, len(timeline.marks), timeline.end, timeline.prompt_tokens)


def _visible(attributes: Mapping[str, Value]) -> dict[str, str | int | float | bool]:
    """The attributes that every viewer may see."""
    return {
        name: value
        for name, value in attributes.items()
        if isinstance(value, (bool, int, float)) or (isinstance(value, str) and name in _WORDS)
    }
