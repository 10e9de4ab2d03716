"""One call of the gRPC service: its key, its exchange, its end."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from actors.runtime import current_traceparent
from app.apis.grpc.transport import Call, ended_by
from app.server.auth import AccessLevel
from app.server.background import detached_exchange
from app.server.errors import ApiError
from app.server.exchange import Exchange, current_request_id
from app.server.middleware import labels_of
from app.server.routes import Route
from app.server.service import Service
from telemetry.logs.lines import Event

__all__ = ["answer_call"]

log = logging.getLogger("troupe.grpc")

_GONE = 499


@asynccontextmanager
async def answer_call(service: Service, route: Route, call: Call) -> AsyncIterator[Exchange]:
    """The exchange of a call that needs a key. Errors end it with their status, a client that leaves aborts what it has
    in the engine."""
    headers = call.headers
    try:
        tenant = service.keyring.check(AccessLevel.USER, headers, None)
    except ApiError as error:
        service.count_http(route.path, error.status)
        raise ended_by(error) from None
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
        raise ended_by(failure)
