"""The feed's data as JSON. Times are seconds of the server's monotonic clock; counts run from the start.

Nothing here contains a prompt, an answer, a client's id, or an id that /abort_request accepts: a viewer must not read
or abort the requests of others.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "ActorView",
    "AdapterView",
    "CacheGroupView",
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
    stage: str  # current stage of the start
    progress: float  # of the start, 0 .. 1
    device: str | None = None
    dtype: str | None = None
    parameters: int | None = None
    context_length: int | None = None


class LoadView(msgspec.Struct, kw_only=True):
    """Work. ``steps``, ``step_seconds`` (model and sampling), ``output_tokens`` and ``preemptions`` are monotonic."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    step_age: float = 0.0  # of the oldest unanswered step
    output_tokens: int = 0
    preemptions: int = 0
    refused: int = 0


class CacheView(msgspec.Struct, kw_only=True):
    """Pages: ``free + evictable + used == total``. Tokens: looked up, and found in the prefix cache, so far."""

    page_size: int
    total: int
    free: int
    evictable: int
    used: int
    queried_tokens: int
    hit_tokens: int
    groups: list[CacheGroupView]


class CacheGroupView(msgspec.Struct, kw_only=True):
    """Pages of one cache group, of a model that has several; the main page table is one of them."""

    name: str
    total: int
    used: int


class ActorView(msgspec.Struct, kw_only=True):
    """One actor. ``role`` is its name without the number; ``handled`` and ``busy`` (seconds) are monotonic."""

    name: str
    role: str
    state: str
    restarts: int
    depth: int  # messages in its mailbox
    message: str | None = None  # in work
    message_age: float | None = None
    handled: int = 0
    busy: float = 0.0
    waited: float = 0.0  # total seconds that messages waited in the mailbox


class AdapterView(msgspec.Struct, kw_only=True):
    """A loaded LoRA adapter. ``requests``: since it was loaded; ``live``: those that have not ended.

    ``resident``: replicas on whose device it lies; elsewhere it is in the host's memory.
    """

    name: str
    requests: int
    live: int
    resident: int


class EdgeView(msgspec.Struct, kw_only=True):
    """Messages from one role to another so far. ``http`` and ``streams`` are the two ends of the server."""

    source: str
    target: str
    count: int


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A phase of a request: tokenize, queue, prefill or decode. ``end`` is null while it lasts."""

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
    error: str  # kind of error; empty if it ended well or is live
    adapter: str  # its LoRA adapter; empty without one
    spans: list[Span]
    marks: list[tuple[str, float]]


class Frame(msgspec.Struct, kw_only=True):
    """One frame. ``requests`` has all shown requests if ``whole``, otherwise those that changed since the last
    frame."""

    number: int
    at: float
    unix: float  # the same moment in seconds since 1970
    whole: bool
    viewers: int
    http: int  # HTTP requests in flight, without viewers
    restarts: int  # of actors, since the start
    model: ModelView
    load: LoadView
    cache: CacheView | None
    actors: list[ActorView]
    edges: list[EdgeView]
    adapters: list[AdapterView]  # at most 32, first those that lie on a device, then by requests
    adapters_loaded: int
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
    """One request, hop by hop. ``duration`` is null while it is live; ``elapsed`` grows until then."""

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
