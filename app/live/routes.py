"""The routes of the live page and its feed."""

from __future__ import annotations

from app.live.feed.answers import Waterfall
from app.live.feed.handlers import MAX_FRAMES, feed, feed_request
from app.live.page_files import page, page_file
from app.server.auth import AccessLevel
from app.server.routes import Route

__all__ = ["ROUTES"]

ROUTES: tuple[Route, ...] = (
    Route(
        path="/",
        methods=("GET",),
        level=AccessLevel.PUBLIC,
        handler=page,
        summary="The live page",
        media=("text/html",),
        tag="pages",
    ),
    Route(
        path="/page/{file}",
        slashes=True,
        methods=("GET",),
        level=AccessLevel.PUBLIC,
        handler=page_file,
        summary="A script or a style of the live page",
        media=("text/javascript", "text/css", "image/svg+xml"),
        tag="pages",
        logged=False,
    ),
    Route(
        path="/stage",
        methods=("GET",),
        level=AccessLevel.USER,
        handler=feed,
        summary="The current actors and requests, four times a second",
        query=(("frames", "End after so many frames; without it the feed goes on.", 1, MAX_FRAMES),),
        media=("text/event-stream",),
        tag="pages",
        logged=False,
    ),
    Route(
        path="/stage/requests/{id}",
        slashes=True,
        methods=("GET",),
        level=AccessLevel.USER,
        handler=feed_request,
        summary="A live or recent request, hop by hop",
        answer=Waterfall,
        tag="pages",
        logged=False,
    ),
)
