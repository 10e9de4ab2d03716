"""Operation: what the server is, and levers for those who run it."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from quart import Response, request

from app.auth import Level
from app.errors import ApiError, invalid
from app.exchange import Exchange
from app.openai.requests import Label
from app.probes import troupe_version
from app.service import Service, json_response

__all__ = [
    "AbortRequest",
    "TraceLevel",
    "abort_request",
    "drain",
    "flush_cache",
    "model_info",
    "server_info",
    "set_trace_level",
]


class AbortRequest(msgspec.Struct, kw_only=True):
    """``rid``: an id given by the server or by the client, as a whole. A key aborts its own requests, the admin key
    everyone's. ``abort_all`` needs the admin key."""

    rid: Label | None = None
    abort_all: bool | None = None


async def abort_request(service: Service, exchange: Exchange, body: AbortRequest) -> Response:
    """End requests early; what they had is sent to whoever waits for it."""
    if body.abort_all:
        try:
            service.keyring.check(Level.ADMIN, request.scope["headers"], request.scope.get("server"))
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
    """Forget every cached prefix; 409 while requests run or wait."""
    service.require_ready()
    if not await service.engine.flush_cache():
        raise ApiError(409, "Requests run or wait; flush the cache when there are none.", code="busy")
    return json_response({"success": True, "message": "The prefix cache is empty."})


class TraceLevel(msgspec.Struct, kw_only=True):
    """``level``: 0 to 3, as of --trace-level. It may come in the query instead."""

    level: int | None = None


async def set_trace_level(service: Service, exchange: Exchange, body: TraceLevel) -> Response:
    """Trace more or less of the requests that come from now on."""
    level = body.level if body.level is not None else request.args.get("level", type=int)
    if level is None or not 0 <= level <= 3:
        raise invalid("level: give an integer from 0 to 3.", param="level")
    tracing = service.engine.tracing
    if tracing is None:
        raise ApiError(409, "Nothing is traced here: start the server with --enable-trace.", code="tracing_disabled")
    tracing.level = level
    return json_response({"success": True, "level": level})


async def drain(service: Service, exchange: Exchange, body: None) -> Response:
    """Take no more requests; the live ones go on. /ready answers 503 from now on; the manager ends the process."""
    service.engine.begin_drain()
    others = len(service.live) - 1
    return json_response({"status": "draining", "in_flight": others}, 202)


async def server_info(service: Service, exchange: Exchange, body: None) -> Response:
    """The engine's actors and workers, its arguments without keys, its load and its version."""
    told = service.engine.describe()
    return json_response(
        {
            "version": troupe_version(),
            "model_path": service.arguments.model_path,
            "served_model_name": service.model_name,
            "uptime_seconds": round(time.time() - service.created, 1),
            "http_in_flight": len(service.live),
            **told,
            "status": msgspec.to_builtins(service.status),
        }
    )


async def model_info(service: Service, exchange: Exchange, body: None) -> Response:
    """The model: where it came from, its shape, and the sampling it asks for."""
    arguments = service.arguments
    engine = service.engine
    told: dict[str, Any] = {
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
        told |= msgspec.to_builtins(engine.model_info)
        told["architectures"] = [engine.model_info.architecture]
    return json_response(told)
