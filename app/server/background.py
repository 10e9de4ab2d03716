"""Requests for which no client waits: lines of batches, and responses that are made in the background."""

from __future__ import annotations

from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from app.server.exchange import Exchange
from app.server.middleware import close_timeline
from app.server.request_body import RequestBody
from app.server.routes import Route
from app.server.service import Service
from telemetry.timeline import RequestTimeline

__all__ = ["Answer", "answer_request", "detached_exchange", "interactive_requests"]


class Answer(msgspec.Struct, frozen=True):
    """``retry_after``: seconds after which the request may succeed; None if a retry does not help."""

    status: int
    body: bytes
    request_id: str
    retry_after: float | None = None


async def _nothing(message: MutableMapping[str, Any]) -> None:
    """Where the messages of an exchange without a client go."""


async def _no_body() -> MutableMapping[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


@asynccontextmanager
async def detached_exchange(
    service: Service,
    route: Route,
    *,
    tenant: str,
    request_id: str | None = None,
    timeline: RequestTimeline | None = None,
    background: bool = True,
    label: str | None = None,
    traceparent: str | None = None,
) -> AsyncIterator[Exchange]:
    """An exchange that sends no HTTP. It is live like any other: a key can abort it, and a stopping server ends it.

    ``background``: whether no client waits for it. ``label``: the client's id of it. ``timeline``: one that is open
    already; without one a route with an operation gets its own.
    """
    exchange = Exchange(
        _nothing,
        request_id=request_id or service.ids.new(route.id_prefix),
        route=route,
        method="POST",
        path=route.path,
        label=label,
        http_version="1.1",
        send_deadline=0,
        keep_alive=0,
        metrics=service.engine.metrics.streams,
        dialect=route.dialect,
        body=RequestBody(_no_body, [], "1.1", service.uploads, is_read=False),
    )
    exchange.tenant, exchange.background = tenant, background
    exchange.timeline = timeline
    if timeline is None and route.operation:
        exchange.timeline = service.engine.timelines.open(
            exchange.request_id,
            operation=route.operation,
            model=service.model_name,
            label=label,
            tenant=tenant,
            traceparent=traceparent,
        )
    service.live.add(exchange)
    try:
        yield exchange
    finally:
        try:
            await exchange.close()
        finally:
            service.live.discard(exchange)
            close_timeline(service, exchange)


async def answer_request(service: Service, route: Route, data: bytes, *, tenant: str) -> Answer:
    """The whole answer to a body of a route that generates; errors are answers, too."""
    async with detached_exchange(service, route, tenant=tenant) as exchange:
        try:
            service.require_ready()
            body = service.decode(data, route.body or msgspec.Struct, route, exchange)
            response = await route.handler(service, exchange, body)
            content = await response.get_data(as_text=False)
            answer = Answer(response.status_code, content, exchange.request_id)
        except Exception as error:
            failure = service.failure(exchange, error)
            again = failure.retry_after if failure.retryable else None
            answer = Answer(
                failure.status, exchange.dialect.body(failure, exchange.request_id), exchange.request_id, again
            )
    service.count_http(route.path, answer.status)
    return answer


def interactive_requests(service: Service) -> int:
    """Live requests for which a client waits."""
    return sum(1 for exchange in service.live if exchange.stream_ids and not exchange.background)
