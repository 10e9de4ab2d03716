"""``GET /stage``, the feed of the live page, and ``GET /stage/requests/{id}``, one request in full."""

from __future__ import annotations

from types import TracebackType

from quart import Response, request
from quart.wrappers.response import ResponseBody

from app.live.feed.frames import MAX_VIEWERS, Feed
from app.server.dialect import OPENAI
from app.server.errors import ApiError, invalid
from app.server.exchange import Exchange
from app.server.service import Service, json_response

__all__ = ["MAX_FRAMES", "feed", "feed_request"]

MAX_FRAMES = 1_000_000


async def feed(service: Service, exchange: Exchange, body: None) -> Response:
    """Frames as server-sent events, until the client disconnects or the server stops; ``?frames=1`` for one frame."""
    frames = request.args.get("frames", str(MAX_FRAMES))
    if not (frames.isascii() and frames.isdigit() and len(frames) <= 7 and 1 <= int(frames) <= MAX_FRAMES):
        raise invalid(f"frames: must be a number from 1 to {MAX_FRAMES}.", param="frames")
    if not service.feed.admit(exchange):
        raise ApiError(
            503,
            f"{MAX_VIEWERS} viewers look at the stage already; try again when one has left.",
            kind="service_unavailable_error",
            code="too_many_viewers",
            retry_after=5,
        )
    return Response(
        _Frames(service.feed, exchange, int(frames)),
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-store",
            "X-Accel-Buffering": "no",
        },
    )


async def feed_request(service: Service, exchange: Exchange, name: str) -> Response:
    """One live or recent request of the own key, hop by hop, by the feed's handle or the id that the client received.

    The admin key sees all requests.
    """
    waterfall = service.feed.requests.waterfall(name, exchange.tenant)
    if waterfall is None:
        raise ApiError(
            404, "No live or recent request has this name; only the latest are kept.", code="request_not_found"
        )
    return json_response(waterfall)


class _Frames(ResponseBody):
    """The body: one event a frame."""

    def __init__(self, feed: Feed, exchange: Exchange, frames: int) -> None:
        self._feed = feed
        self._exchange = exchange
        self._left = frames
        self._seen = 0

    async def __aenter__(self) -> _Frames:
        return self

    async def __aexit__(self, exc_type: type | None, exc_value: BaseException | None, tb: TracebackType | None) -> None:
        return

    def __aiter__(self) -> _Frames:
        return self

    async def __anext__(self) -> bytes:
        if self._left < 0:
            raise StopAsyncIteration
        interruption = self._exchange.interruption
        if self._left == 0 or interruption is not None:
            self._left = -1
            last = b"" if interruption is None else OPENAI.event(interruption, self._exchange.request_id)
            return last + OPENAI.end
        self._left -= 1
        self._seen, frame = await self._feed.next(self._seen, self._exchange.tenant)
        return b"data: " + frame + b"\n\n"
