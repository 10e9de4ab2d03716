"""Timelines record what happens to each request, hop by hop. Traces, the request log, latency metrics and the live page
read the same record.

Actors write when something begins, ends or happens, and never for each token: decoding costs nothing here. Times are
``time.monotonic`` seconds, which all processes of one machine share.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Protocol

import msgspec

__all__ = ["Content", "Hop", "Mark", "Outcome", "RequestTimeline", "TimelineListener", "Timelines", "Value"]

Value = str | int | float | bool | tuple[str, ...]

_MAX_HOPS = 256
"""Events recorded for one request. Listeners receive later ones too, but they are not stored."""

_MAX_MARKS = 256


class Hop(msgspec.Struct, eq=False):
    """One hop of a request: ``name`` is admission, tokenize, queue, cache, prefill, decode, detokenize or stream.

    ``choice``: the sequence's index within the request; None for the request as a whole.
    """

    name: str
    start: float
    end: float | None = None
    choice: int | None = None
    attributes: dict[str, Value] = {}
    trace: object = None  # belongs to the tracing listener


class Mark(msgspec.Struct, eq=False):
    """An event at one moment: first_token, preempted, resumed, worker_died, quarantined, aborted ..."""

    name: str
    at: float
    choice: int | None = None
    attributes: dict[str, Value] = {}


class Outcome(msgspec.Struct, frozen=True):
    """How a request ended.

    ``finish_reasons`` has one entry a choice: stop, length, abort, error, or empty for a choice without one. It is
    empty for a request that was never accepted. ``error_type`` is empty when the request ended well. Otherwise it is
    the class of the engine's error (InvalidRequest, QueueFull, RequestTimeout, RequestFailed ...), ``abort`` for an
    aborted request or a disconnected client, or the error code of the HTTP server (``invalid_api_key``).
    """

    finish_reasons: tuple[str, ...] = ()
    error_type: str = ""
    message: str = ""


class Content(msgspec.Struct, eq=False):
    """Texts of a request, stored only while a listener needs them: the prompt as given, and the text of each choice."""

    input: object = None
    output: dict[int, list[str]] = {}

    def add(self, choice: int, text: str) -> None:
        if text:
            self.output.setdefault(choice, []).append(text)


class TimelineListener(Protocol):
    """Receives the events of timelines, in the event loop, at once. It must not raise and must not wait."""

    def began(self, timeline: RequestTimeline) -> None: ...

    def hop_ended(self, timeline: RequestTimeline, hop: Hop) -> None: ...

    def marked(self, timeline: RequestTimeline, mark: Mark) -> None: ...

    def ended(self, timeline: RequestTimeline) -> None: ...


class RequestTimeline(msgspec.Struct, eq=False, weakref=True):
    """One request from its arrival to its end, including refused and invalid ones.

    ``request``: the request's parameters, by OpenTelemetry GenAI attribute names (``gen_ai.request.max_tokens``).
    ``trace`` belongs to the tracing listener.
    """

    request_id: str
    operation: str  # chat | text_completion | generate_content
    model: str
    started: float
    started_unix: float  # the same moment in seconds since 1970
    label: str | None = None  # the client's own id
    tenant: str = ""  # its tenant, where several share the engine
    traceparent: str | None = None  # of the caller; the request's own while it is traced
    request: dict[str, Value] = {}
    probe: bool = False  # a health check or warm-up: neither measured nor logged
    hops: list[Hop] = []
    marks: list[Mark] = []
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    end: float | None = None
    outcome: Outcome | None = None
    trace: object = None
    content: Content | None = None  # set by a listener at the beginning and taken at the end
    listeners: tuple[TimelineListener, ...] = ()

    def begin(self, name: str, at: float, choice: int | None = None, **attributes: Value) -> Hop:
        """Begin a hop. Pass it to :meth:`finish` at its end."""
        hop = Hop(name=name, start=at, choice=choice, attributes=attributes)
        if self.end is None and len(self.hops) < _MAX_HOPS:
            self.hops.append(hop)
        return hop

    def open_hop(self, name: str, choice: int | None = None) -> Hop | None:
        """The last open hop of this name, for actors that were restarted meanwhile."""
        for hop in reversed(self.hops):
            if hop.name == name and hop.choice == choice:
                return hop if hop.end is None else None
        return None

    def finish_all(self, choice: int | None, at: float, *names: str) -> None:
        """Finish all open hops of this choice, or those with these names."""
        for hop in self.hops:
            if hop.end is None and hop.choice == choice and (not names or hop.name in names):
                self.finish(hop, at)

    def finish(self, hop: Hop, at: float, **attributes: Value) -> None:
        """Finish a hop. Finishing it twice changes nothing."""
        if hop.end is not None:
            return
        hop.end = at
        hop.attributes |= attributes
        for listener in self.listeners:
            listener.hop_ended(self, hop)

    def mark(self, name: str, at: float, choice: int | None = None, **attributes: Value) -> None:
        """Record an event. After the end nothing is recorded."""
        if self.end is not None:
            return
        mark = Mark(name=name, at=at, choice=choice, attributes=attributes)
        if len(self.marks) < _MAX_MARKS:
            self.marks.append(mark)
        for listener in self.listeners:
            listener.marked(self, mark)

    def close(self, outcome: Outcome, at: float) -> None:
        """Record the request's end, once. Open hops end with it."""
        if self.end is not None:
            return
        for hop in self.hops:
            self.finish(hop, at)
        self.end = at
        self.outcome = outcome
        for listener in self.listeners:
            listener.ended(self)


class Timelines:
    """The timelines of one engine: all live ones, and the last ``keep`` that ended."""

    def __init__(self, *, keep: int = 256) -> None:
        self.recent: deque[RequestTimeline] = deque(maxlen=keep)
        self._live: dict[str, RequestTimeline] = {}
        self._listeners: tuple[TimelineListener, ...] = ()

    def listen(self, listener: TimelineListener) -> None:
        """Notify ``listener`` of every request that begins from now on."""
        self._listeners += (listener,)

    def live(self) -> Iterator[RequestTimeline]:
        """Live timelines in order of arrival."""
        return iter(list(self._live.values()))

    def find(self, request_id: str) -> RequestTimeline | None:
        """A live or recent timeline."""
        result = self._live.get(request_id)
        if result is None:
            result = next((timeline for timeline in self.recent if timeline.request_id == request_id), None)
        return result

    def open(
        self,
        request_id: str,
        *,
        operation: str,
        model: str,
        label: str | None = None,
        tenant: str = "",
        traceparent: str | None = None,
        request: dict[str, Value] | None = None,
        probe: bool = False,
    ) -> RequestTimeline:
        """Open the timeline of a new request; its first hop, ``admission``, begins."""
        timeline = RequestTimeline(
            request_id=request_id,
            operation=operation,
            model=model,
            started=time.monotonic(),
            started_unix=time.time(),
            label=label,
            tenant=tenant,
            traceparent=traceparent,
            request=request or {},
            probe=probe,
            listeners=self._listeners,
        )
        self._live[request_id] = timeline
        for listener in self._listeners:
            listener.began(timeline)
        timeline.begin("admission", timeline.started)
        return timeline

    def close(self, timeline: RequestTimeline, outcome: Outcome) -> None:
        """Record the end of a request. Closing it twice changes nothing."""
        if self._live.pop(timeline.request_id, None) is None:
            return
        timeline.close(outcome, time.monotonic())
        self.recent.append(timeline)
