"""Hypercorn's HTTP/1.1 (0.18), with a fast path for chunks of event streams.

For each chunk Hypercorn creates two events, and h11 runs its state machine without a change of state. Sending such
chunks is most of the work of a server of token streams.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

import h11
import msgspec
from hypercorn.asyncio.worker_context import EventWrapper
from hypercorn.events import Closed, Event
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import Response
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import ASGIHTTPState, HTTPStream

__all__ = ["Chunk", "EventStream", "Http1", "NextRequest", "rebound"]

Function = TypeVar("Function", bound=Callable[..., Any])


def rebound(function: Function, **names: Any) -> Function:
    """``function`` with other values for some names of its module.

    Hypercorn takes no classes as arguments. Replacing them in its modules would change every server of the process.
    """
    assert isinstance(function, FunctionType)
    made = FunctionType(
        function.__code__, function.__globals__ | names, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return cast(Function, made)


class Chunk(msgspec.Struct, gc=False):
    """Bytes for the connection: Hypercorn's RawData, created ten times as fast."""

    data: bytes


class NextRequest(EventWrapper):
    """Reading waits for this event while a client has sent its next request too early.

    Hypercorn would wait for ever when there is no next request, and never release the connection.
    """

    def __init__(self) -> None:
        super().__init__()
        self.never = False

    async def wait(self) -> None:
        """Wait. Raises ConnectionAbortedError when this connection answers no more requests."""
        if not self.never:
            await super().wait()
        if self.never:
            raise ConnectionAbortedError("This connection answers no more requests.")


class EventStream(HTTPStream):
    """A request and its response; chunks of an event stream go to :class:`Http1` directly."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        protocol = getattr(self.send, "__self__", None)  # `send` is the connection's stream_send
        self._http1 = protocol if isinstance(protocol, Http1) else None

    async def app_send(self, message: Any) -> None:
        if (
            self._http1 is not None
            and self._http1.in_chunks
            and self.state is ASGIHTTPState.RESPONSE  # afterwards the connection may serve another request
            and message is not None
            and message.get("more_body")
            and self.scope["method"] != "HEAD"
        ):
            await self._http1.send_chunk(message["body"])
        else:
            await super().app_send(message)


class Http1(H11Protocol):
    """A connection. ``in_chunks``: whether its response is a chunked event stream.

    :meth:`handle` raises ConnectionAbortedError when bytes after a request will not be read.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.in_chunks = False
        self.can_read: NextRequest = NextRequest()
        self._write: Any = self.send

    async def handle(self, event: Event) -> None:
        if isinstance(event, Closed):
            await self._read_no_more()
        await super().handle(event)

    _create_stream = rebound(H11Protocol._create_stream, HTTPStream=EventStream)

    async def _maybe_recycle(self) -> None:
        connection = self.connection
        if self.context.terminated.is_set() or not (connection.our_state is connection.their_state is h11.DONE):
            await self._read_no_more()
        await super()._maybe_recycle()

    async def _read_no_more(self) -> None:
        self.can_read.never = True
        await self.can_read.set()

    async def stream_send(self, event: StreamEvent) -> None:
        await super().stream_send(event)
        if isinstance(event, Response):
            self.in_chunks = self._is_in_chunks(event)

    async def send_chunk(self, data: bytes) -> None:
        """Send a chunk of the response, framed by RFC 9112, section 7.1. After the end of the connection: nothing."""
        if data and self.connection.our_state is h11.SEND_BODY:
            await self._write(Chunk(b"%x\r\n%b\r\n" % (len(data), data)))

    def _is_in_chunks(self, response: Response) -> bool:
        """Whether h11 sends the body in chunks: the length is unknown and the client supports chunks."""
        if not isinstance(self.connection, h11.Connection):
            return False
        headers = {name.lower(): value for name, value in response.headers}
        version = self.connection.their_http_version
        return (
            response.status_code == 200  # some other statuses have no body in any case
            and headers.get(b"content-type", b"").startswith((b"text/event-stream", b"application/x-ndjson"))
            and b"content-length" not in headers
            and version is not None
            and version >= b"1.1"
        )
