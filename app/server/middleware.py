"""The outermost layer: keys, ids, deadlines and the access log. It decides on the raw path, before anything else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any

from actors.runtime import current_traceparent
from app.server.auth import AccessLevel
from app.server.browser_policy import BrowserPolicy
from app.server.custom_labels import custom_labels
from app.server.dialect import OPENAI
from app.server.errors import ApiError, shutting_down
from app.server.exchange import Exchange, Send, current_request_id, is_label
from app.server.path_suggestions import suggest_path
from app.server.request_body import Receive, RequestBody
from app.server.routes import Route
from telemetry.logs.lines import Event
from telemetry.timeline import Outcome

if TYPE_CHECKING:
    from app.server.service import Service
    from telemetry.traces.tracing import ServerSpan, Tracing

__all__ = ["Application", "Middleware", "close_timeline", "labels_of"]

log = logging.getLogger("troupe.http")

Scope = MutableMapping[str, Any]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_CUT_SECONDS = 1.0
_GONE = 499  # logged and counted when the client disconnected before there was a status
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


_NO_WEBSOCKETS = "This server opens no WebSocket, so it has no realtime API; use POST /v1/responses with stream true."


class Middleware:
    """ASGI middleware around the Quart application."""

    def __init__(self, inner: Application, service: Service) -> None:
        self._inner = inner
        self._service = service
        self._policy = BrowserPolicy(service.arguments)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._inner(scope, receive, send)
            return
        scope = self._without_root(scope)
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
            return
        await self._http(scope, receive, send)

    def _without_root(self, scope: Scope) -> Scope:
        """The scope without the path prefix of a proxy or ASGI server."""
        path: str = scope["path"]
        for prefix in (scope.get("root_path", ""), self._service.arguments.fastapi_root_path):
            if prefix and (path == prefix or path.startswith(prefix + "/")):
                path = path[len(prefix) :] or "/"
        return {**scope, "path": path, "root_path": ""}

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse: no route accepts a websocket. A server that can answers the handshake as a request."""
        await receive()
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": 1008, "reason": ""})
            return
        error = ApiError(404, _NO_WEBSOCKETS, code="not_found")
        headers = [(b"content-type", b"application/json")]
        if scope.get("http_version", "1.1") == "1.1":
            headers.append((b"connection", b"close"))  # the server closes it: a client must not use it again
        await send({"type": "websocket.http.response.start", "status": 404, "headers": headers})
        body = OPENAI.body(error, self._service.ids.new("req-"))
        await send({"type": "websocket.http.response.body", "body": body, "more_body": False})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        method, path = scope["method"], scope["path"]
        route = service.table.find(method, path)
        label, traceparent = labels_of(scope["headers"])
        http_version = scope.get("http_version", "1.1")
        is_read = route is not None and route.body is not None
        upload = route is not None and route.upload
        body = RequestBody(receive, scope["headers"], http_version, service.uploads, is_read=is_read, upload=upload)
        exchange = Exchange(
            send,
            request_id=service.ids.new(route.id_prefix if route is not None else "req-"),
            route=route,
            method=method,
            path=path,
            label=label,
            http_version=http_version,
            send_deadline=service.send_deadline,
            keep_alive=service.arguments.sse_keep_alive_interval,
            metrics=service.engine.metrics.streams,
            body=body,
            dialect=service.table.dialect(route, path, scope["headers"]),
        )
        scope["troupe.exchange"] = exchange
        if service.engine.tracing is not None and route is not None and route.operation:
            exchange.span = _serve(service.engine.tracing, scope, route, exchange)
            if exchange.span is not None:
                traceparent = exchange.span.traceparent
        current_traceparent.set(traceparent)  # the server runs each request in a context of its own
        current_request_id.set(exchange.request_id)
        service.live.add(exchange)
        if route is not None and route.operation:
            exchange.custom_labels = custom_labels(scope["headers"], service.arguments)
            exchange.timeline = service.engine.timelines.open(
                exchange.request_id,
                operation=route.operation,
                model=service.model_name,
                label=label,
                traceparent=traceparent,
                request=dict(exchange.custom_labels),
            )
        try:
            refusal = self._refusal(scope, route, exchange)
            if exchange.timeline is not None:
                exchange.timeline.tenant = exchange.tenant
            if refusal is not None:
                exchange.outcome = refusal.code or ""
                await exchange.answer(refusal)
            else:
                body.owner = exchange.tenant or _address(scope)
                await self._inner(scope, body.receive, exchange.send)
            if not exchange.complete:
                exchange.outcome = exchange.outcome or "disconnect"
        except asyncio.CancelledError:
            # A disconnect ends the application normally. Only a stopping server cancels it, with the connection open.
            exchange.outcome = exchange.outcome or "cut"
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(_CUT_SECONDS):
                    await exchange.cut(shutting_down())
            raise
        finally:
            body.release()
            try:
                await exchange.close()
            finally:
                service.live.discard(exchange)
                close_timeline(service, exchange)
                if exchange.span is not None:
                    exchange.span.end(exchange.status, "" if exchange.complete else exchange.outcome or "disconnect")
                self._record(exchange)

    def _refusal(self, scope: Scope, route: Route | None, exchange: Exchange) -> ApiError | None:
        service = self._service
        method, path, headers = scope["method"], scope["path"], scope["headers"]
        siblings = service.table.at(path)
        level = route.level if route is not None else siblings[0].level if siblings else AccessLevel.USER
        if (origin := self._policy.origin(headers)) is not None:
            exchange.grants = partial(self._policy.grants, origin)
        keyed = service.keyring.guards(level)
        # Load balancers send probes under any host name, and probes reveal only whether the server works.
        if route is None or route.tag != "probes" or level is not AccessLevel.PUBLIC:
            refusal = self._policy.check_host(headers, keyed=keyed)
            if refusal is not None:
                return refusal
        if method == "OPTIONS" and (answer := self._policy.preflight(headers)) is not None:
            return answer
        try:
            exchange.tenant = service.keyring.check(level, headers, scope.get("server"))
        except ApiError as error:
            return error
        if _framed_twice(headers):
            return ApiError(
                400,
                "The body's length is given twice, by Content-Length and by Transfer-Encoding; send one of them.",
                code="invalid_framing",
                headers={"Connection": "close"},
            )
        refusal = self._policy.check_page(method, headers, keyed=keyed, admin=level is AccessLevel.ADMIN)
        if refusal is not None:
            return refusal
        if route is None and siblings:
            allowed = {"Allow": ", ".join(service.table.methods(path))}
            if method == "OPTIONS":
                return ApiError(204, "", headers=allowed)
            return ApiError(
                405,
                f"{path} does not accept {method}; use {allowed['Allow']}.",
                code="method_not_allowed",
                headers=allowed,
            )
        if route is None:
            return ApiError(404, suggest_path(service.table, method, path), code="not_found")
        return None

    def _record(self, exchange: Exchange) -> None:
        route = exchange.route
        endpoint = route.path if route is not None else "other"
        outcome = exchange.outcome or "done"
        self._service.count_http(endpoint, exchange.status or _GONE)
        if route is not None and not route.logged:
            return
        if exchange.path.startswith(self._service.arguments.access_log_exclude_prefixes):
            return
        path = endpoint if route is not None else repr(exchange.path[:128])
        status, milliseconds = exchange.status or _GONE, (time.monotonic() - exchange.started) * 1000
        tokens = exchange.tokens
        log.info(
            Event(
                f"{exchange.method} {path} {status} {outcome} {milliseconds:.1f} ms",
                {
                    "request_id": exchange.request_id,
                    "label": exchange.label,
                    "tokens": None if tokens is None else f"{tokens[0]}+{tokens[1]}",
                    "ignored": exchange.ignored or None,
                },
                details={
                    "method": exchange.method,
                    "path": path,
                    "status": status,
                    "outcome": outcome,
                    "duration_s": round(milliseconds / 1000, 6),
                },
            )
        )


def close_timeline(service: Service, exchange: Exchange) -> None:
    """Close the timeline of a request that never reached the engine; the engine closes the others."""
    timeline, error = exchange.timeline, exchange.error
    if timeline is None or timeline.end is not None:
        return
    if error is None:
        timeline.mark("client_gone", time.monotonic())
        outcome = Outcome(error_type="abort", message="The client disconnected before the request was read.")
    else:
        timeline.mark("rejected", time.monotonic(), status=error.status)
        outcome = Outcome(error_type=error.code or str(error.status), message=error.message)
    service.engine.timelines.close(timeline, outcome)


def _serve(tracing: Tracing, scope: Scope, route: Route, exchange: Exchange) -> ServerSpan | None:
    """The span of an exchange on a generating route."""
    attributes: dict[str, str | int] = {
        "url.path": exchange.path,
        "url.scheme": scope.get("scheme", "http"),
        "network.protocol.name": "http",
        "network.protocol.version": scope.get("http_version", "1.1"),
        "troupe.request.id": exchange.request_id,
    }
    server = scope.get("server")
    if server:
        attributes["server.address"] = str(server[0])
        if server[1] is not None:
            attributes["server.port"] = int(server[1])
    return tracing.serve(scope["headers"], method=exchange.method, route=route.path, attributes=attributes)


def _address(scope: Scope) -> str:
    """The client's host, or that of its proxy; "" for a Unix socket."""
    client = scope.get("client")
    return str(client[0]) if client else ""


def _framed_twice(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether a proxy may have found another end of this request (request smuggling)."""
    names = {name.lower() for name, _ in headers}
    return b"content-length" in names and b"transfer-encoding" in names


def labels_of(headers: list[tuple[bytes, bytes]]) -> tuple[str | None, str | None]:
    """The client's ``x-request-id`` and W3C ``traceparent``, where they are well-formed."""
    label = traceparent = None
    for name, value in headers:
        lowered = name.lower()
        if lowered == b"x-request-id":
            text = value.decode("latin-1")
            label = text if is_label(text) else None
        elif lowered == b"traceparent":
            text = value.decode("latin-1")
            traceparent = text if _TRACEPARENT.fullmatch(text) else None
    return label, traceparent
