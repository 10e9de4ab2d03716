"""HTTP/1.1 as Hypercorn speaks it (0.18), with a short way for the pieces of an event stream.

For each piece h11 walks its state machine, which changes nothing, and writes three lines; a server of token streams
does little else than send such pieces.
"""

from __future__ import annotations

from typing import Any

import h11
from hypercorn.events import RawData
from hypercorn.protocol.events import Body, Response
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h11 import H11Protocol

__all__ = ["Http1"]


class Http1(H11Protocol):
    """Frames pieces of a chunked event stream itself (RFC 9112, section 7.1); all else is h11's."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._in_chunks = False

    async def stream_send(self, event: StreamEvent) -> None:
        if self._in_chunks and isinstance(event, Body) and event.data and self.connection.our_state is h11.SEND_BODY:
            await self.send(RawData(b"%x\r\n%b\r\n" % (len(event.data), event.data)))
            return
        await super().stream_send(event)
        if isinstance(event, Response):
            self._in_chunks = self._is_in_chunks(event)

    def _is_in_chunks(self, response: Response) -> bool:
        """Whether h11 sends the body in chunks: to a client that knows them, where nobody knows the length."""
        headers = {name.lower(): value for name, value in response.headers}
        if not isinstance(self.connection, h11.Connection):
            return False
        version = self.connection.their_http_version
        return (
            headers.get(b"content-type", b"").startswith(b"text/event-stream")
            and b"content-length" not in headers
            and version is not None
            and version >= b"1.1"
        )
