"""HTTP/1.1 as Hypercorn speaks it (0.18), with a short way for the pieces of an event stream.

For each piece Hypercorn makes two events and h11 walks its state machine, which changes nothing, and writes three
lines; a server of token streams does little else than send such pieces.
"""

from __future__ import annotations

from typing import Any

import h11
import msgspec
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import Response
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import HTTPStream

__all__ = ["Chunk", "EventStream", "Http1"]


class Chunk(msgspec.Struct, gc=False):
    """Bytes for the connection: Hypercorn's RawData, made in a tenth of the time."""

    data: bytes


class Http1(H11Protocol):
    """A connection. ``in_chunks``: whether its response is a chunked event stream."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.in_chunks = False
        self._write: Any = self.send

    async def stream_send(self, event: StreamEvent) -> None:
        await super().stream_send(event)
        if isinstance(event, Response):
            self.in_chunks = self._is_in_chunks(event)

    async def send_chunk(self, data: bytes) -> None:
        """A piece of the response, framed as RFC 9112, section 7.1, has it. After the connection's end nothing."""
        if data and self.connection.our_state is h11.SEND_BODY:
            await self._write(Chunk(b"%x\r\n%b\r\n" % (len(data), data)))

    def _is_in_chunks(self, response: Response) -> bool:
        """Whether h11 sends the body in chunks: to a client that knows them, where nobody knows the length."""
        if not isinstance(self.connection, h11.Connection):
            return False
        headers = {name.lower(): value for name, value in response.headers}
        version = self.connection.their_http_version
        return (
            headers.get(b"content-type", b"").startswith(b"text/event-stream")
            and b"content-length" not in headers
            and version is not None
            and version >= b"1.1"
        )


class EventStream(HTTPStream):
    """A request and its response; pieces of an event stream go to :class:`Http1` at once."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        protocol = getattr(self.send, "__self__", None)  # `send` is the connection's stream_send
        self._http1 = protocol if isinstance(protocol, Http1) else None

    async def app_send(self, message: Any) -> None:
        if (
            self._http1 is not None
            and self._http1.in_chunks
            and message is not None
            and message.get("more_body")
            and self.scope["method"] != "HEAD"
        ):
            await self._http1.send_chunk(message["body"])
        else:
            await super().app_send(message)
