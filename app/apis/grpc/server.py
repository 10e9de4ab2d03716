"""The gRPC server (``--grpc-mode``): in the event loop of the HTTP server, over the same engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from app.apis.grpc.calls import headers_of, refuse
from app.apis.grpc.messages import METHODS, POOL, SERVICE, message
from app.apis.grpc.servicer import Servicer
from app.server.auth import AccessLevel
from app.server.errors import ApiError
from app.server.request_body import MAX_BODY
from app.server.service import Service

__all__ = ["GrpcServer"]

log = logging.getLogger("troupe.grpc")

_STOP_SECONDS = 2.0
_WATCH_SECONDS = 0.5
_STREAMS = 1024  # of one connection at a time
for _module in (health_pb2, reflection_pb2):  # reflection describes all services from one pool
    POOL.AddSerializedFile(_module.DESCRIPTOR.serialized_pb)
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_BODY),
    ("grpc.max_concurrent_streams", _STREAMS),
    ("grpc.max_metadata_size", 64 * 1024),
    ("grpc.so_reuseport", 0),  # another server on the port is an error
)


class GrpcServer:
    """Serves until :meth:`stop`. ``port``: where it listens."""

    def __init__(self, service: Service) -> None:
        """Bind the port. Raises OSError when it is in use."""
        servicer = Servicer(service)
        self._server = grpc.aio.server(interceptors=(_KeyedReflection(service),), options=_OPTIONS)
        handlers = {
            name: (grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler)(
                getattr(servicer, name),
                request_deserializer=message(request).FromString,
                response_serializer=message(response).SerializeToString,
            )
            for name, (request, response, streams) in METHODS.items()
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(_Health(servicer), self._server)
        reflection.enable_server_reflection((SERVICE, _HEALTH, reflection.SERVICE_NAME), self._server, POOL)
        arguments = service.arguments
        host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        place = f"{host}:{arguments.grpc_port}"
        try:
            self.port: int = self._server.add_insecure_port(place)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {place} for gRPC; choose another --grpc-port") from error

    async def start(self) -> None:
        await self._server.start()
        log.info("gRPC listens on port %d", self.port)

    async def stop(self) -> None:
        """Admit no call; those that run have a moment to end."""
        await self._server.stop(_STOP_SECONDS)


class _Health(health_pb2_grpc.HealthServicer):
    """gRPC's health service, open like HTTP's probes. The empty name stands for all services."""

    def __init__(self, servicer: Servicer) -> None:
        self._servicer = servicer

    def _status(self, name: str) -> int | None:
        if name not in ("", SERVICE):
            return None
        status = health_pb2.HealthCheckResponse
        return int(status.SERVING if self._servicer.health()[0] else status.NOT_SERVING)

    async def Check(self, request: Any, context: Any) -> Any:
        status = self._status(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"There is no service {request.service[:80]!r} here.")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        sent: int | None = None
        while True:
            status = self._status(request.service)
            if status is None:
                status = int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != sent:
                sent = status
                yield health_pb2.HealthCheckResponse(status=status)
            await asyncio.sleep(_WATCH_SECONDS)


class _KeyedReflection(grpc.aio.ServerInterceptor):
    """Demands a key for the description of the services, as HTTP does for its own."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        if not call.method.startswith("/grpc.reflection."):
            return await continuation(call)
        try:
            self._service.keyring.check(AccessLevel.USER, headers_of(call.invocation_metadata), None)
        except ApiError as error:
            return grpc.stream_stream_rpc_method_handler(_refusal(error))
        return await continuation(call)


def _refusal(error: ApiError) -> Callable[[Any, Any], Awaitable[None]]:
    async def handler(requests: Any, context: Any) -> None:
        await refuse(context, error)

    return handler
