"""Administration: information about the server, and operations on it."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec
from quart import Response, request

from app.apis.openai.requests import Label
from app.server.auth import AccessLevel
from app.server.errors import ApiError, invalid
from app.server.exchange import Exchange
from app.server.service import Service, json_response
from app.server.version import troupe_version

__all__ = [
    "AbortRequest",
    "PauseRequest",
    "TraceLevel",
    "abort_request",
    "continue_generation",
    "drain",
    "flush_cache",
    "model_info",
    "pause_generation",
    "server_info",
    "set_trace_level",
]


class AbortRequest(msgspec.Struct, kw_only=True):
    """``rid``: a whole id of the server or the client. A key aborts its own requests, the admin key all. ``abort_all``
    requires the admin key."""

    rid: Label | None = None
    abort_all: bool | None = None


async def abort_request(service: Service, exchange: Exchange, body: AbortRequest) -> Response:
    """Abort requests. Their clients receive the output so far."""
    if body.abort_all:
        try:
            service.keyring.check(AccessLevel.ADMIN, request.scope["headers"], request.scope.get("server"))
        except ApiError as error:
            raise ApiError(
                401 if error.status == 401 else 403,
                "abort_all: needs the admin key.",
                kind="authentication_error",
                param="abort_all",
                code="admin_key_needed",
            ) from None
        return json_response({"aborted": await service.engine.abort(all=True)})
    if not body.rid:
        raise invalid("rid: give the id of a request, or abort_all.", param="rid", code="missing_field")
    return json_response({"aborted": await service.abort(body.rid, exchange.tenant)})


async def flush_cache(service: Service, exchange: Exchange, body: None) -> Response:
    """Clear the prefix cache; 409 while requests run or wait."""
    service.require_ready()
    if not await service.engine.flush_cache():
        raise ApiError(409, "Requests run or wait; flush the cache when there are none.", code="busy")
    return json_response({"success": True, "message": "The prefix cache is empty."})


class PauseRequest(msgspec.Struct, kw_only=True):
    """``mode``: ``abort`` (default) ends the live requests; with ``in_place`` they keep their cache; with ``retract``
    they return to the queue, so that the prefix cache can be cleared."""

    mode: Literal["abort", "in_place", "retract"] | None = None


async def pause_generation(service: Service, exchange: Exchange, body: PauseRequest) -> Response:
    """Run no more steps until /continue_generation. The answer comes when none is in flight."""
    service.require_ready()
    await service.engine.pause_generation(body.mode or "abort")
    return json_response({"status": "ok", "message": "Generation is paused; POST /continue_generation ends the pause."})


async def continue_generation(service: Service, exchange: Exchange, body: None) -> Response:
    """End a pause. Nothing happens without one."""
    service.require_ready()
    await service.engine.continue_generation()
    return json_response({"status": "ok", "message": "Generation goes on."})


class TraceLevel(msgspec.Struct, kw_only=True):
    """``level``: 0 to 3, as ``--trace-level``. It may also be in the query."""

    level: int | None = None


async def set_trace_level(service: Service, exchange: Exchange, body: TraceLevel) -> Response:
    """Set the trace level of requests from now on."""
    level = body.level if body.level is not None else request.args.get("level", type=int)
    if level is None or not 0 <= level <= 3:
        raise invalid("level: give an integer from 0 to 3.", param="level")
    tracing = service.engine.tracing
    if tracing is None:
        raise ApiError(409, "Nothing is traced here: start the server with --enable-trace.", code="tracing_disabled")
    tracing.level = level
    return json_response({"success": True, "level": level})


async def drain(service: Service, exchange: Exchange, body: None) -> Response:
    """Admit no more requests; the live ones continue. /ready returns 503 from now on, and the manager ends the
    process."""
    service.engine.begin_drain()
    others = len(service.live) - 1
    return json_response({"status": "draining", "in_flight": others}, 202)


async def server_info(service: Service, exchange: Exchange, body: None) -> Response:
    """Actors, workers, arguments without keys, load and version."""
    answer = service.engine.describe()
    return json_response(
        {
            "version": troupe_version(),
            "model_path": service.arguments.model_path,
            "served_model_name": service.model_name,
            "uptime_seconds": round(time.time() - service.created, 1),
            "http_in_flight": len(service.live),
            **answer,
            "status": msgspec.to_builtins(service.status),
        }
    )


async def model_info(service: Service, exchange: Exchange, body: None) -> Response:
    """The model: its origin, shape, and preferred sampling."""
    arguments = service.arguments
    engine = service.engine
    answer: dict[str, Any] = {
        "model_path": arguments.model_path,
        "tokenizer_path": arguments.tokenizer_path or arguments.model_path,
        "served_model_name": service.model_name,
        "revision": arguments.revision,
        "is_generation": True,
        "weight_version": arguments.weight_version,
        "preferred_sampling_params": arguments.preferred_sampling_params or None,
        "sampling_defaults": engine.generation_defaults,
        "context_length": engine.context_length,
        "vocab_size": engine.vocab_size,
    }
    if engine.model_info is not None:
        answer |= msgspec.to_builtins(engine.model_info)
        answer["architectures"] = [engine.model_info.architecture]
    return json_response(answer)
