"""Streams of deltas as responses, in the framing of their API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Protocol

from quart import Response
from quart.wrappers.response import ResponseBody

from actors.protocol.requests import Delta, RequestAborted
from actors.requests.streams import RequestStream
from app.server.exchange import Exchange
from app.server.merged_streams import MergedStreams
from app.server.service import Service

__all__ = ["ChunkWriter", "sse_response"]

_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class ChunkWriter(Protocol):
    """Turns deltas into events."""

    def chunk(self, delta: Delta) -> bytes:
        """The events of one delta."""
        ...

    def end(self) -> bytes:
        """The events after the last delta."""
        ...

    def aborted(self) -> bytes | None:
        """The events after an abort; None where the API reports an abort as an error."""
        ...


class SseBody(ResponseBody):
    """The body: one write a delta, the end together with the last, comments while idle, and an error event on failure.

    The exchange closes the engine's streams, even when this body was never started.
    """

    def __init__(
        self,
        service: Service,
        exchange: Exchange,
        source: AsyncIterator[Delta],
        writer: ChunkWriter,
        first: bytes = b"",
    ) -> None:
        self._first = first
        self._service = service
        self._exchange = exchange
        self._source = source
        self._writer = writer
        self._ended = False

    async def __aenter__(self) -> SseBody:
        return self

    async def __aexit__(self, exc_type: type | None, exc_value: BaseException | None, tb: TracebackType | None) -> None:
        if isinstance(self._source, MergedStreams):
            await self._source.stop()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._ended:
            raise StopAsyncIteration
        if self._first:
            first, self._first = self._first, b""
            return first
        exchange = self._exchange
        try:
            exchange.waiting()
            try:
                delta = await self._source.__anext__()
            finally:
                if (comment := exchange.woken()) is not None:
                    await comment
            if isinstance(self._source, RequestStream) and self._source.complete:
                self._ended = True
                return self._writer.chunk(delta) + self._writer.end() + exchange.dialect.end
            return self._writer.chunk(delta)
        except StopAsyncIteration:
            self._ended = True
            return self._writer.end() + exchange.dialect.end
        except Exception as error:
            self._ended = True
            answer = self._service.failure(exchange, error)
            last = self._writer.aborted() if isinstance(error, RequestAborted) else None
            if last is None:
                last = exchange.dialect.event(answer, exchange.request_id)
            return last + exchange.dialect.end


def sse_response(
    service: Service,
    exchange: Exchange,
    source: AsyncIterator[Delta],
    writer: ChunkWriter,
    *,
    first: bytes = b"",
) -> Response:
    """A streamed response. Call it only after all checks that could still return an error status.

    ``first``: what is sent before the first delta.
    """
    if exchange.timeline is not None:
        exchange.timeline.request["gen_ai.request.stream"] = True
    headers = {"Content-Type": f"{exchange.dialect.media_type}; charset=utf-8", **_HEADERS}
    return Response(SseBody(service, exchange, source, writer, first), headers=headers)
