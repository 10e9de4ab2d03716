"""One call of the gRPC service: its key, its exchange, its end."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from actors.runtime import current_traceparent
from app.server.auth import AccessLevel
from app.server.background import detached_exchange
from app.server.errors import ApiError
from app.server.exchange import Exchange, current_request_id
from app.server.middleware import labels_of
from app.server.routes import Route
from app.server.service import Service
from telemetry.logs.lines import Event

__all__ = ["answer_call", "headers_of", "refuse", "seconds_left"]

log = logging.getLogger("troupe.grpc")

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_GONE = 499


def headers_of(metadata: Any) -> list[tuple[bytes, bytes]]:
    """A call's metadata as HTTP's headers."""
    return [
        (name.encode(), value if isinstance(value, bytes) else value.encode("latin-1", "replace"))
        for name, value in metadata or ()
    ]


def seconds_left(context: Any) -> float | None:
    """Until the client's deadline; None without one."""
    left: float | None = context.time_remaining()
    return None if left is None else min(max(left, 1e-3), 86400.0)


async def refuse(context: Any, error: ApiError) -> None:
    """End a call with the status of an error. Where waiting helps, ``retry-after`` says how many seconds."""
    trailing = [("error-code", error.code or str(error.status))]
    if (retry := error.headers().get("Retry-After")) is not None:
        trailing.append(("retry-after", retry))
    code = _CODES.get(error.status, grpc.StatusCode.UNKNOWN)
    await context.abort(code, error.message, tuple(trailing))


@asynccontextmanager
async def answer_call(service: Service, route: Route, context: Any) -> AsyncIterator[Exchange]:
    """The exchange of a call that needs a key. Errors end it with their status, a client that leaves aborts what it has
    in the engine."""
    headers = headers_of(context.invocation_metadata())
    try:
        tenant = service.keyring.check(AccessLevel.USER, headers, None)
    except ApiError as error:
        service.count_http(route.path, error.status)
        await refuse(context, error)
        raise
    label, traceparent = labels_of(headers)
    tracing, status, failure = service.engine.tracing, 200, None
    span = None
    if tracing is not None and route.operation:
        attributes: dict[str, str | int] = {"rpc.system": "grpc", "rpc.method": route.path.rpartition("/")[2]}
        span = tracing.serve(headers, method="POST", route=route.path, attributes=attributes)
        traceparent = span.traceparent if span is not None else traceparent
    current_traceparent.set(traceparent)  # each call runs in a task of its own
    began = time.monotonic()
    try:
        async with detached_exchange(service, route, tenant=tenant, label=label, traceparent=traceparent) as exchange:
            current_request_id.set(exchange.request_id)
            try:
                yield exchange
            except Exception as error:
                failure = service.failure(exchange, error)
                status = failure.status
    except BaseException:  # the client has left, or its deadline is over
        status = _GONE
        raise
    finally:
        service.count_http(route.path, status)
        outcome = "done" if status == 200 else failure.code if failure is not None and failure.code else "disconnect"
        if span is not None:
            span.end(status, "" if status == 200 else outcome)
        milliseconds = (time.monotonic() - began) * 1000
        if route.logged:
            log.info(
                Event(
                    f"{route.path} {status} {outcome} {milliseconds:.1f} ms",
                    {"request_id": exchange.request_id, "label": exchange.label},
                    details={"path": route.path, "status": status, "duration_s": round(milliseconds / 1000, 6)},
                )
            )
    if failure is not None:
        await refuse(context, failure)
