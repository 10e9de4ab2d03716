"""The routes of probes and of information for routers."""

from __future__ import annotations

from app.apis.probes.handlers import (
    Loads,
    Readiness,
    health,
    health_generate,
    live,
    load,
    loads,
    metrics,
    ready,
    version,
)
from app.server.auth import AccessLevel
from app.server.routes import Route

__all__ = ["ROUTES"]

ROUTES: tuple[Route, ...] = (
    Route(
        path="/live",
        methods=("GET",),
        level=AccessLevel.PUBLIC,
        handler=live,
        summary="Whether the event loop runs",
        tag="probes",
        logged=False,
    ),
    Route(
        path="/ready",
        methods=("GET",),
        level=AccessLevel.PUBLIC,
        handler=ready,
        summary="Whether requests are admitted, and the progress of loading",
        answer=Readiness,
        tag="probes",
        logged=False,
    ),
    Route(
        path="/health",
        methods=("GET",),
        level=AccessLevel.PUBLIC,
        handler=health,
        summary="Whether the engine makes progress",
        tag="probes",
        logged=False,
    ),
    Route(
        path="/ping",
        methods=("GET",),
        level=AccessLevel.PUBLIC,
        handler=health,
        summary="The same as /health",
        tag="probes",
        logged=False,
    ),
    Route(
        path="/health_generate",
        methods=("GET",),
        level=AccessLevel.USER,
        handler=health_generate,
        summary="Whether a token can be generated, end to end",
        tag="probes",
        logged=False,
    ),
    Route(
        path="/metrics",
        methods=("GET",),
        level=AccessLevel.USER,
        handler=metrics,
        summary="Metrics for Prometheus",
        media=("text/plain",),
        tag="probes",
        logged=False,
    ),
    Route(
        path="/version",
        methods=("GET",),
        level=AccessLevel.USER,
        handler=version,
        summary="The version of Troupe",
        tag="probes",
        logged=False,
    ),
    Route(
        path="/v1/loads",
        methods=("GET",),
        level=AccessLevel.USER,
        handler=loads,
        summary="Load, for routers",
        query=(("dp_rank", "Only this replica.", 0, 65535),),
        answer=Loads,
        tag="probes",
        logged=False,
    ),
    Route(
        path="/get_load",
        methods=("GET",),
        level=AccessLevel.USER,
        handler=load,
        summary="Load, for routers, in SGLang's older form",
        tag="probes",
        logged=False,
    ),
)
