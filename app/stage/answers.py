"""What the stage tells, as JSON. Times are seconds of the server's monotonic clock, counts run from the start.

Nothing here holds a prompt, an answer, a client's own id or an id that /abort_request takes: who may look at the stage
may not read or end the requests of others.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "ActorView",
    "CacheView",
    "EdgeView",
    "Frame",
    "HopView",
    "LoadView",
    "MarkView",
    "ModelView",
    "RequestView",
    "Span",
    "Waterfall",
]


class ModelView(msgspec.Struct, kw_only=True):
    """The served model."""

    name: str
    phase: str  # starting | ready | draining | failed | stopped
    stage: str  # what the start is at
    progress: float  # of the start, 0 .. 1
    device: str | None = None
    dtype: str | None = None
    parameters: int | None = None
    context_length: int | None = None


class LoadView(msgspec.Struct, kw_only=True):
    """Work. ``steps``, ``step_seconds`` (model and sampling), ``output_tokens`` and ``preemptions`` only ever grow."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    step_age: float = 0.0  # of the oldest step without an answer
    output_tokens: int = 0
    preemptions: int = 0
    refused: int = 0


class CacheView(msgspec.Struct, kw_only=True):
    """Pages: ``free + evictable + used == total``. Tokens: looked up, and found, in the prefix cache so far."""

    page_size: int
    total: int
    free: int
    evictable: int
    used: int
    queried_tokens: int
    hit_tokens: int


class ActorView(msgspec.Struct, kw_only=True):
    """One actor. ``role`` is its name without its number; ``handled`` and ``busy`` (seconds) only ever grow."""

    name: str
    role: str
    state: str
    restarts: int
    depth: int  # messages in its mailbox
    message: str | None = None  # in its hands
    message_age: float | None = None
    handled: int = 0
    busy: float = 0.0
    waited: float = 0.0  # seconds that its messages lay in the mailbox, all together


class EdgeView(msgspec.Struct, kw_only=True):
    """Messages that went from one role to another so far. ``http`` and ``streams`` are the two ends of the server."""

    source: str
    target: str
    count: int


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A stay of a request: tokenize, queue, prefill or decode. ``end`` is null while it lasts."""

    name: str
    start: float
    end: float | None
    choice: int


class RequestView(msgspec.Struct, kw_only=True):
    """One request on the timeline. ``handle`` names it to /stage/requests/{id}."""

    handle: str
    operation: str
    start: float
    end: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    error: str  # the kind of error; empty when it ended well or lives
    spans: list[Span]
    marks: list[tuple[str, float]]


class Frame(msgspec.Struct, kw_only=True):
    """One picture. ``requests`` holds all that are shown when ``whole``, else what is new since the last number."""

    number: int
    at: float
    unix: float  # the same moment in seconds since 1970
    whole: bool
    viewers: int
    http: int  # HTTP requests in flight, viewers aside
    restarts: int  # of actors, since the start
    model: ModelView
    load: LoadView
    cache: CacheView | None
    actors: list[ActorView]
    edges: list[EdgeView]
    live: int
    requests: list[RequestView]


class HopView(msgspec.Struct, kw_only=True):
    """One hop. Times are seconds since the request's arrival."""

    name: str
    start: float
    end: float | None
    choice: int | None
    attributes: dict[str, str | int | float | bool]


class MarkView(msgspec.Struct, kw_only=True):
    name: str
    at: float
    choice: int | None
    attributes: dict[str, str | int | float | bool]


class Waterfall(msgspec.Struct, kw_only=True):
    """One request, hop by hop. ``duration`` is null while it lives; ``elapsed`` goes on until then."""

    handle: str
    operation: str
    model: str
    started_unix: float
    elapsed: float
    duration: float | None
    trace_id: str | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reasons: list[str]
    error: str
    request: dict[str, str | int | float | bool]
    hops: list[HopView]
    marks: list[MarkView]
