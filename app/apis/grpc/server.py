"""The gRPC server (``--grpc-mode``): in the event loop of the HTTP server, over the same engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from actors.options import Arguments
from app.apis.grpc.messages import METHODS, POOL, SERVICE
from app.apis.grpc.servicer import Servicer
from app.apis.grpc.transport import Call, CallEnded, Method, ended_by, grpc_application
from app.server.auth import AccessLevel
from app.server.errors import ApiError
from app.server.hypercorn import configuration, listen, serve_until
from app.server.service import Service

__all__ = ["GrpcServer"]

log = logging.getLogger("troupe.grpc")

_STOP_SECONDS = 2.0
_WATCH_SECONDS = 0.5
_HEALTH_BYTES = 64 << 10  # of a message that needs no key
_STREAMS = 768  # of one connection at a time; Hypercorn closes connections at 1,000
_IDLE_SECONDS = 7200.0
"""Before a connection without calls is closed. gRPC's clients keep theirs, and a call on one that closes fails."""
for _module in (health_pb2, reflection_pb2):  # reflection describes all services from one pool
    POOL.AddSerializedFile(_module.DESCRIPTOR.serialized_pb)
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class GrpcServer:
    """Serves until :meth:`stop`. ``port``: where it listens."""

    def __init__(self, service: Service) -> None:
        """Bind the port. Raises OSError when it is in use."""
        self._config = _configuration(service.arguments)
        try:
            self._sockets = listen(self._config)
        except OSError as error:
            raise OSError(f"cannot listen on {self._config.bind[0]} for gRPC; choose another --grpc-port") from error
        self.port: int = self._sockets.insecure_sockets[0].getsockname()[1]
        self._application: Any = grpc_application(_methods(service))
        self._stop = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._serving = asyncio.create_task(
            serve_until(self._stop.wait, self._application, self._config, self._sockets, first_request=_IDLE_SECONDS),
            name="troupe-grpc",
        )
        log.info("gRPC listens on port %d", self.port)

    async def stop(self) -> None:
        """Admit no call; those that run have a moment to end."""
        self._stop.set()
        if self._serving is None:
            for bound in self._sockets.insecure_sockets:
                bound.close()
            return
        await asyncio.wait({self._serving}, timeout=2 * _STOP_SECONDS)  # from Python 3.12 on it waits for connections
        self._serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._serving


def _configuration(arguments: Arguments) -> Any:
    config = configuration(arguments)
    config.bind = [f"{config.bind[0].rpartition(':')[0]}:{arguments.grpc_port}"]
    config.h2_max_concurrent_streams = _STREAMS
    config.keep_alive_timeout = _IDLE_SECONDS
    config.keep_alive_max_requests = 1 << 62  # a channel has one connection, and the calls that run would be cut
    config.graceful_timeout = _STOP_SECONDS
    return config


def _methods(service: Service) -> dict[str, Method]:
    """The methods of all services, by their paths."""
    servicer = Servicer(service)
    health = _Health(servicer)
    return {
        **{f"/{SERVICE}/{name}": Method(getattr(servicer, name), streams) for name, (*_, streams) in METHODS.items()},
        f"/{_HEALTH}/Check": Method(health.Check, False, _HEALTH_BYTES),
        f"/{_HEALTH}/Watch": Method(health.Watch, True, _HEALTH_BYTES),
        f"/{reflection.SERVICE_NAME}/ServerReflectionInfo": Method(_Reflection(service).ServerReflectionInfo, True),
    }


class _Health:
    """gRPC's health service, open like HTTP's probes. The empty name stands for all services."""

    def __init__(self, servicer: Servicer) -> None:
        self._servicer = servicer

    def _status(self, name: str) -> int | None:
        if name not in ("", SERVICE):
            return None
        status = health_pb2.HealthCheckResponse
        return int(status.SERVING if self._servicer.health()[0] else status.NOT_SERVING)

    async def Check(self, call: Call) -> Any:
        request = await call.request(health_pb2.HealthCheckRequest)
        status = self._status(request.service)
        if status is None:
            raise CallEnded(grpc.StatusCode.NOT_FOUND, f"There is no service {request.service[:80]!r} here.")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, call: Call) -> AsyncIterator[Any]:
        request = await call.request(health_pb2.HealthCheckRequest)
        sent: int | None = None
        while True:
            status = self._status(request.service)
            if status is None:
                status = int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != sent:
                sent = status
                yield health_pb2.HealthCheckResponse(status=status)
            await asyncio.sleep(_WATCH_SECONDS)


class _Reflection:
    """The description of the services, for those with a key, as HTTP's own."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._servicer = reflection.aio.ReflectionServicer((SERVICE, _HEALTH, reflection.SERVICE_NAME), POOL)

    async def ServerReflectionInfo(self, call: Call) -> AsyncIterator[Any]:
        try:
            self._service.keyring.check(AccessLevel.USER, call.headers, None)
        except ApiError as error:
            raise ended_by(error) from None
        requests = call.messages(reflection_pb2.ServerReflectionRequest)
        async for response in self._servicer.ServerReflectionInfo(requests, None):
            yield response
