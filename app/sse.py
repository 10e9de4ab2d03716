"""Server-sent events: a stream of deltas as a response that never ends in silence."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Protocol

from quart import Response
from quart.wrappers.response import ResponseBody

from actors.requests import Delta, RequestAborted
from actors.streams import RequestStream
from app.collecting import Merged
from app.exchange import DONE, Exchange
from app.service import Service

__all__ = ["ChunkWriter", "sse_response"]

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class ChunkWriter(Protocol):
    """Turns deltas into events."""

    def chunk(self, delta: Delta) -> bytes:
        """The events of one delta."""
        ...

    def end(self) -> bytes:
        """What follows the last delta, before [DONE]."""
        ...

    def aborted(self) -> bytes | None:
        """What follows when the request was aborted; None where the API has no word for it but an error."""
        ...


class SseBody(ResponseBody):
    """The body: one write a delta, the last with the end, comments while there is none, an error event and [DONE] at
    the latest end.

    Nothing here closes the engine's streams: the exchange does, even when this body was never started.
    """

    def __init__(
        self,
        service: Service,
        exchange: Exchange,
        source: AsyncIterator[Delta],
        writer: ChunkWriter,
    ) -> None:
        self._service = service
        self._exchange = exchange
        self._source = source
        self._writer = writer
        self._ended = False

    async def __aenter__(self) -> SseBody:
        return self

    async def __aexit__(self, exc_type: type | None, exc_value: BaseException | None, tb: TracebackType | None) -> None:
        if isinstance(self._source, Merged):
            await self._source.stop()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._ended:
            raise StopAsyncIteration
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
                return self._writer.chunk(delta) + self._writer.end() + DONE
            return self._writer.chunk(delta)
        except StopAsyncIteration:
            self._ended = True
            return self._writer.end() + DONE
        except Exception as error:
            self._ended = True
            told = self._service.failure(exchange, error)
            last = self._writer.aborted() if isinstance(error, RequestAborted) else None
            return (told.event() if last is None else last) + DONE


def sse_response(
    service: Service,
    exchange: Exchange,
    source: AsyncIterator[Delta],
    writer: ChunkWriter,
) -> Response:
    """A streamed response. Call it only when nothing is left that could be a proper error status."""
    if exchange.timeline is not None:
        exchange.timeline.request["gen_ai.request.stream"] = True
    return Response(SseBody(service, exchange, source, writer), headers=dict(_HEADERS))
