"""One HTTP exchange from its first byte to its last: ids, engine streams, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from actors.requests.streams import RequestStream
from app.server.dialect import OPENAI, Dialect
from app.server.errors import ApiError
from app.server.request_body import RequestBody
from app.server.routes import Route
from telemetry.metrics.streams import StreamMetrics
from telemetry.timeline import RequestTimeline, Value

if TYPE_CHECKING:
    from telemetry.traces.tracing import ServerSpan

__all__ = ["Exchange", "Send", "current_request_id", "is_label"]

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

current_request_id: ContextVar[str | None] = ContextVar("troupe_request_id", default=None)
"""The id of the current exchange, for logs."""

_LABEL = re.compile(r"[\x21-\x7e]{1,256}")


def is_label(text: str) -> bool:
    """Whether a client's id is safe in a header and a log line."""
    return _LABEL.fullmatch(text) is not None


class Exchange:
    """One HTTP request with its response: what a handler gets beside the service and the body.

    It has the request's ids, route, path parts and tenant, sends the response or an error (``send``, ``answer``,
    ``cut``), detects a client that stopped reading, and closes the engine's streams at the end (``own``).

    ``send_deadline``: seconds that a write may wait for the client. A slower client is disconnected, which frees the
    slot of its request.
    """

    def __init__(
        self,
        send: Send,
        *,
        request_id: str,
        route: Route | None,
        method: str,
        path: str,
        label: str | None,
        http_version: str,
        send_deadline: float,
        keep_alive: float,
        metrics: StreamMetrics,
        body: RequestBody,
        dialect: Dialect = OPENAI,
    ) -> None:
        self.dialect = dialect
        self.route = route
        self.method = method
        self.path = path
        self.label = label  # the client's own id: echoed and logged, never a key
        self.grants: Callable[[Iterable[bytes]], list[tuple[bytes, bytes]]] | None = None  # CORS, for an allowed page
        self.request_id = request_id
        self.adapter: str | None = None  # name of the LoRA adapter that its model is
        self.tenant = ""  # tenant of its API key, where there are several keys
        self.parts: dict[str, str] = {}  # the variable parts of its path
        self.background = False  # whether no client waits for it: it makes room for those that have one
        self.started = time.monotonic()
        self.status = 0  # 0: nothing was sent
        self.timeline: RequestTimeline | None = None  # of a generating request
        self.span: ServerSpan | None = None  # while it is traced
        self.custom_labels: dict[str, Value] = {}  # of the metrics of its requests
        self.error: ApiError | None = None  # the answer, where it is one
        self.outcome = ""  # what ended it, if not the status: "disconnect", "stalled", an error code
        self.renames: Mapping[str, str] = {}  # parameter names of the engine -> those of this API, for errors
        self.ignored = ""  # fields of the body without effect, for the client and the log
        self.tokens: tuple[int, int] | None = None  # prompt, completion
        self.interruption: ApiError | None = None  # why the server aborts it, set before the abort
        self.closed = asyncio.Event()
        self._event_stream = False
        self.complete = False  # whether the whole response was sent
        self._taken = False  # the server aborts the connection; the handler sends nothing more
        self._timeline_taken = False
        self._streams: list[RequestStream] = []
        self._loop = asyncio.get_running_loop()
        self._send = send
        self._http_version = http_version
        self._send_deadline = send_deadline
        self._keep_alive = keep_alive if dialect.keep_alive else 0.0
        self._metrics = metrics
        self.body = body
        self._sending_since: float | None = None
        self._handler: asyncio.Task[Any] | None = None  # the task that sends the response
        self._idle_since: float | None = None  # set while a stream has nothing to send
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None

    def own(self, stream: RequestStream) -> None:
        """Close the stream with this exchange, in every case."""
        self._streams.append(stream)

    def take_timeline(self, label: str | None) -> RequestTimeline | None:
        """The timeline for the engine: the first prompt takes it, further prompts get their own."""
        timeline = self.timeline
        if timeline is None or self._timeline_taken:
            return None
        self._timeline_taken = True
        timeline.label = label if label is not None else self.label
        return timeline

    @property
    def stream_ids(self) -> list[str]:
        return [stream.request_id for stream in self._streams]

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """The ``send`` that the application sees."""
        if self._taken:
            return
        if message["type"] == "http.response.body" and message.get("more_body"):
            await self._pass(message)
        else:
            await self._forward(message)

    async def _forward(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            media_type = self.dialect.media_type.encode()
            self._event_stream = any(value.startswith(media_type) for _, value in message["headers"])
            headers = [
                (name, value)
                for name, value in message["headers"]
                if not (name.lower() == b"connection" and self._http_version >= "2")
            ]
            headers.append((b"x-request-id", (self.label or self.request_id).encode("latin-1")))
            headers += self.dialect.headers(self.request_id)
            if self.span is not None:
                headers.append((b"traceparent", self.span.traceparent.encode()))
            if self.ignored:
                headers.append((b"x-ignored-fields", self.ignored.encode("ascii")))
            if self.label is not None:
                headers.append((b"x-troupe-request-id", self.request_id.encode()))
            if self.grants is not None:
                headers += self.grants(name for name, _ in headers)
            message = {**message, "headers": headers}
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if last and not self.body.over:
            await self._pass({**message, "more_body": True})
            self.complete = True
            await self.body.drop()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._pass(message)
        self.complete = self.complete or last

    async def _pass(self, message: MutableMapping[str, Any]) -> None:
        """Pass a message to the server and measure how long the client takes to read it."""
        loop = self._loop
        if self._timer is None:
            self._handler = asyncio.current_task()
            self._timer = loop.call_later(self._period, self._tick, loop)
        since = self._sending_since = loop.time()
        try:
            await self._send(message)
        finally:
            self._sending_since = None
            self._metrics.sent(loop.time() - since)

    async def answer(self, error: ApiError) -> None:
        """Send an error as a complete response."""
        self.error = error
        empty = error.status == 204
        body = b"" if empty or self.method == "HEAD" else self.dialect.body(error, self.request_id)
        headers = [] if empty else [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        headers += [(name.lower().encode(), value.encode()) for name, value in error.headers().items()]
        await self._forward({"type": "http.response.start", "status": self.dialect.status(error), "headers": headers})
        await self._forward({"type": "http.response.body", "body": body, "more_body": False})

    async def cut(self, error: ApiError) -> None:
        """End an incomplete response with an error, because the server aborts the connection."""
        self._taken = True
        if self._comment is not None:
            self._comment.cancel()
        if self._handler is not None and not self._handler.done():
            self._handler.cancel()
            await asyncio.wait({self._handler})
        if self.status == 0:
            await self.answer(error)
        elif self._event_stream and not self.complete:
            last = self.dialect.event(error, self.request_id) + self.dialect.end
            await self._forward({"type": "http.response.body", "body": last, "more_body": False})

    def waiting(self) -> None:
        """Mark the start of a wait for the next delta: keep-alive comments may be sent."""
        if self._keep_alive:
            self._idle_since = self._loop.time()

    def woken(self) -> asyncio.Task[None] | None:
        """Mark the end of the wait. Returns a comment that is being written; await it first."""
        self._idle_since = None
        comment, self._comment = self._comment, None
        return comment

    @property
    def _period(self) -> float:
        limits = [self._send_deadline / 2] if self._send_deadline else [1.0]
        if self._keep_alive:
            limits.append(self._keep_alive / 2)
        return min(1.0, *limits)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        self._timer = loop.call_later(self._period, self._tick, loop)
        if self._sending_since is not None:
            if self._send_deadline and now - self._sending_since >= self._send_deadline and self._handler is not None:
                self.outcome = "stalled"
                self._handler.cancel("the client stopped reading")
        elif self._idle_since is not None and now - self._idle_since >= self._keep_alive:
            self._idle_since = now
            self._comment = loop.create_task(self._write_comment(), name="troupe-keep-alive")

    async def _write_comment(self) -> None:
        with contextlib.suppress(OSError):  # not CancelledError: it may belong to the waiter
            await self.send({"type": "http.response.body", "body": self.dialect.keep_alive, "more_body": True})
            self._metrics.keep_alives += 1

    async def close(self) -> None:
        """Close every stream of this exchange; closing an ended stream changes nothing."""
        if self._timer is not None:
            self._timer.cancel()
        if self._comment is not None and not self._comment.done():
            self._comment.cancel()
        for stream in self._streams:
            await stream.aclose()
        self.closed.set()
