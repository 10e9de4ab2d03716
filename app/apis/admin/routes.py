"""The routes of administration."""

from __future__ import annotations

from app.apis.admin.handlers import (
    AbortRequest,
    PauseRequest,
    TraceLevel,
    abort_request,
    continue_generation,
    drain,
    flush_cache,
    model_info,
    pause_generation,
    server_info,
    set_trace_level,
)
from app.server.auth import AccessLevel
from app.server.routes import Route

__all__ = ["ROUTES"]

ROUTES: tuple[Route, ...] = (
    Route(
        path="/abort_request",
        methods=("POST",),
        level=AccessLevel.USER,
        handler=abort_request,
        summary="Abort a request, or (admin) all of them",
        body=AbortRequest,
        tag="operation",
    ),
    Route(
        path="/flush_cache",
        methods=("POST",),
        level=AccessLevel.ADMIN,
        handler=flush_cache,
        summary="Clear the prefix cache",
        tag="operation",
    ),
    Route(
        path="/pause_generation",
        methods=("POST",),
        level=AccessLevel.ADMIN,
        handler=pause_generation,
        summary="Run no more steps",
        body=PauseRequest,
        optional_body=True,
        tag="operation",
    ),
    Route(
        path="/continue_generation",
        methods=("POST",),
        level=AccessLevel.ADMIN,
        handler=continue_generation,
        summary="End a pause",
        tag="operation",
    ),
    Route(
        path="/set_trace_level",
        methods=("POST",),
        level=AccessLevel.ADMIN,
        handler=set_trace_level,
        summary="Set the trace level",
        body=TraceLevel,
        optional_body=True,
        tag="operation",
    ),
    Route(
        path="/drain",
        methods=("POST",),
        level=AccessLevel.ADMIN,
        handler=drain,
        summary="Admit no more requests",
        tag="operation",
    ),
    *(
        Route(
            path=path,
            methods=("GET",),
            level=AccessLevel.USER,
            handler=server_info,
            summary="The server: workers, actors, arguments, load",
            tag="operation",
        )
        for path in ("/server_info", "/get_server_info")
    ),
    *(
        Route(
            path=path,
            methods=("GET",),
            level=AccessLevel.USER,
            handler=model_info,
            summary="The model",
            tag="operation",
        )
        for path in ("/model_info", "/get_model_info")
    ),
)
