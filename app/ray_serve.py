"""The application in autoscaled replicas of Ray Serve: ``serve run app.ray_serve:application max_replicas=4``.

Each replica is a server of its own in a process of Ray, with its own engine, workers and cache.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from actors.options import ArgumentError, Arguments
from actors.protocol.requests import EngineFailed
from actors.workers.placement import heeded, place
from app.application import Troupe, create_app
from app.cli.arguments import load_arguments
from app.server.logs import set_up_logging

__all__ = ["application", "deployment"]

_RESOURCES = {"cuda": "GPU", "npu": "NPU"}
_REFUSED = {
    "nnodes": "a replica of Ray Serve runs on one machine",
    "grpc_mode": "replicas of Ray Serve on one machine cannot share its port",
    "file_storage_path": "replicas of Ray Serve cannot share a folder of files",
}
_CLOSE_SECONDS = 15.0


def application(args: Mapping[str, object]) -> Any:
    """The application that ``serve run`` and ``serve deploy`` build.

    ``args``: ``min_replicas`` and ``max_replicas`` (1 by default), and options of ``troupe serve`` by their long names,
    as in a file of --config. They win over TROUPE_ARGS. Raises ArgumentError.
    """
    options = dict(args)
    counts = {name: _count(name, options.pop(name, 1)) for name in ("min_replicas", "max_replicas")}
    if counts["min_replicas"] > counts["max_replicas"]:
        counts["max_replicas"] = counts["min_replicas"]
    arguments = load_arguments(mapping=options)
    busy = max(1, arguments.max_running_requests // 2)
    scaling = {**counts, "target_ongoing_requests": busy}
    return deployment(arguments).options(autoscaling_config=scaling).bind()


def deployment(arguments: Arguments) -> Any:
    """The deployment ``Troupe``: one replica, which takes requests once its model is loaded, with a GPU, an NPU or CPUs
    for each worker. Change the number with its ``options``.

    Raises ArgumentError without Ray Serve, and for arguments that replicas cannot have.
    """
    defaults = {field.name: field.default for field in msgspec.structs.fields(Arguments)}
    if problems := [f"{name}: {why}" for name, why in _REFUSED.items() if getattr(arguments, name) != defaults[name]]:
        raise ArgumentError(problems)
    try:
        from ray import serve
    except ImportError as error:
        raise ArgumentError([f"Ray Serve needs its package ({error}): pip install 'troupe-llm[cluster]'"]) from None
    placement = place(arguments, os.environ)
    if arguments.device == "auto":  # a replica without a GPU of Ray's must not find one by itself
        arguments = msgspec.structs.replace(heeded(arguments, placement), device=placement.device)
    workers = arguments.node_workers
    match _RESOURCES.get(placement.device):
        case "GPU":
            resources: dict[str, Any] = {"num_gpus": workers}
        case "NPU":
            resources = {"resources": {"NPU": workers}}
        case _:
            resources = {"num_cpus": workers * (arguments.cpu_threads or 1)}
    replica = serve.ingress(_ReplicaApplication(msgspec.msgpack.encode(arguments)))(_Replica)
    return serve.deployment(
        name="Troupe",
        ray_actor_options=resources,
        max_ongoing_requests=arguments.max_running_requests + arguments.max_queued_requests,
        graceful_shutdown_timeout_s=arguments.shutdown_timeout + _CLOSE_SECONDS,
    )(replica)


def _count(name: str, value: object) -> int:
    try:
        count = int(str(value))
    except ValueError:
        count = 0
    if count < 1:
        raise ArgumentError([f"{name}: must be a number of replicas, at least 1, not {value!r:.128}"])
    return count


class _ReplicaApplication:
    """The ASGI application of a replica. Its start ends when the model is loaded and warmed up.

    ``arguments``: as msgpack, because Ray sends this object to the replica.
    """

    def __init__(self, arguments: bytes) -> None:
        self._arguments = arguments
        self._troupe: Troupe | None = None

    @property
    def troupe(self) -> Troupe:
        if self._troupe is None:
            arguments = msgspec.msgpack.decode(self._arguments, type=Arguments)
            if not logging.getLogger("troupe").hasHandlers():
                set_up_logging(arguments, others=())
            self._troupe = create_app(arguments)
        return self._troupe

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_when_loaded(message: Any) -> None:
            if message["type"] == "lifespan.startup.complete":
                await self.troupe.started.wait()
                if self.troupe.failed.is_set():
                    message = {"type": "lifespan.startup.failed", "message": self.troupe.engine.status.error}
            await send(message)

        await self.troupe(scope, receive, send_when_loaded if scope["type"] == "lifespan" else send)


class _Replica:
    """What Ray Serve calls besides the ASGI application, ``app``, which ``serve.ingress`` adds."""

    app: _ReplicaApplication

    async def check_health(self) -> None:
        """Raise EngineFailed when the engine gave up, so that another replica takes the place of this one."""
        status = self.app.troupe.engine.status
        if status.phase == "failed":
            raise EngineFailed(status.error or "The engine has failed.")
