"""Nodes that Ray starts: an agent on each, in place of the same command."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any

import msgspec

from actors.engine.lifecycle import Lifecycle
from actors.engine.opening import read_model
from actors.options import ArgumentError, Arguments
from actors.protocol.requests import EngineFailed
from actors.text.model_files import ModelDownloadError
from actors.workers.nodes.agent import NodeAgent, NodeError
from actors.workers.placement import place

__all__ = ["RayNodes"]

_log = logging.getLogger("troupe.nodes")

_RESOURCES = {"cpu": "CPU", "cuda": "GPU", "npu": "NPU"}
_PATIENCE_SECONDS = 300.0
_END_SECONDS = 5.0
_POLL_SECONDS = 0.5


class _RayNode:
    """A Ray actor. When its node is lost, Ray starts it again on another."""

    def run(self, arguments: bytes, folder: str, version: str, secret: bytes) -> tuple[str, bool]:
        """Serve node 0 until that ends; returns why it cannot, or an empty text, and whether a restart does not help.

        ``arguments``: as msgpack. ``folder``: what relative paths begin at.
        """
        given = msgspec.msgpack.decode(arguments, type=Arguments)
        try:
            os.chdir(folder)
            model = read_model(given).fingerprint(given)  # downloads it if it is a hub id
            agent = NodeAgent(given, place(given, os.environ), version=version, secret=secret, model=model)
            while True:
                try:
                    asyncio.run(agent.run())
                    return "", False
                except NodeError as error:
                    if error.permanent:
                        return str(error), True
                    _log.warning("%s", error)
        except (ModelDownloadError, OSError) as error:
            return str(error), False
        except ValueError as error:  # a wrong argument, or no model
            return str(error), True


class RayNodes:
    """The nodes of ``arguments`` other than 0, by a placement group of Ray. Use it as an asynchronous context.

    The group has one bundle a node, each on a machine of its own, with a CPU, GPU or NPU for each worker; the first is
    that of node 0 and lies on this machine. At the end all of it is free again. The engine of ``lifecycle`` gives up
    when a node can never serve. Raises ArgumentError without Ray, EngineFailed where its cluster has no room.
    """

    def __init__(self, arguments: Arguments, lifecycle: Lifecycle, *, device: str, version: str, secret: bytes) -> None:
        self._arguments = arguments
        self._device = device
        self._version = version
        self._secret = secret
        self._lifecycle = lifecycle
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_ending = False
        self._owns_connection = False
        self._group: Any = None
        self._actors: list[Any] = []
        self._runs: list[Any] = []

    async def __aenter__(self) -> RayNodes:
        self._loop = asyncio.get_running_loop()
        try:
            await asyncio.to_thread(self._start)
        except BaseException:
            await asyncio.to_thread(self._end)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self._end)

    def _start(self) -> None:
        try:
            import ray
            from ray.util import get_node_ip_address, placement_group
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
        except ImportError as error:
            raise ArgumentError(["--cluster ray needs its package: pip install 'troupe-llm[cluster]'"]) from error
        if not ray.is_initialized():
            try:
                ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), configure_logging=False)
            except ConnectionError as error:
                raise ArgumentError(
                    [f"--cluster ray found no Ray cluster; run `ray start`, or set RAY_ADDRESS: {error}"]
                ) from error
            self._owns_connection = True
        resource, count = _RESOURCES[self._device], self._arguments.node_workers
        bundles = [{resource: count} for _ in range(self._arguments.nnodes)]
        self._group = placement_group(
            [{**bundles[0], f"node:{get_node_ip_address()}": 0.001}, *bundles[1:]], strategy="STRICT_SPREAD"
        )
        deadline = time.monotonic() + float(self._arguments.dist_timeout or _PATIENCE_SECONDS)
        ready = self._group.ready()
        machines = f"{len(bundles)} machines with {count} {resource} each, including this one"
        is_logged = False
        while not ray.wait([ready], timeout=_POLL_SECONDS)[0]:
            if self._lifecycle.stop.is_set():
                return
            if time.monotonic() > deadline:
                raise EngineFailed(f"The Ray cluster has no {machines}. Add machines, or lower --nnodes.")
            if not is_logged:
                _log.info("Waiting until the Ray cluster has %s.", machines)
                is_logged = True
        given = msgspec.structs.replace(self._arguments, cluster=None, api_key=None, admin_api_key=None)
        for rank in range(1, given.nnodes):
            actor = (
                ray.remote(_RayNode)
                .options(
                    num_cpus=count if resource == "CPU" else 0,
                    num_gpus=count if resource == "GPU" else 0,
                    resources={"NPU": count} if resource == "NPU" else None,
                    name=f"troupe node {rank} of {given.dist_init_addr}",
                    max_restarts=-1,
                    max_task_retries=-1,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, rank),
                )
                .remote()
            )
            self._actors.append(actor)
            arguments = msgspec.msgpack.encode(msgspec.structs.replace(given, node_rank=rank))
            run = actor.run.remote(arguments, os.getcwd(), self._version, self._secret)
            run.future().add_done_callback(partial(self._ended, rank))
            self._runs.append(run)

    def _ended(self, rank: int, run: Future[tuple[str, bool]]) -> None:
        """A node has ended; Ray starts it again if that was due to its machine. Called in a thread of Ray's."""
        error = run.exception()
        reason, permanent = run.result() if error is None else (str(error), False)
        if reason and not self._is_ending and self._loop is not None:
            given_up = partial(self._lifecycle.give_up, f"Node {rank} cannot serve: {reason}", permanent=permanent)
            self._loop.call_soon_threadsafe(given_up)

    def _end(self) -> None:
        self._is_ending = True
        if self._group is None and not self._owns_connection:
            return
        import ray
        from ray.util import remove_placement_group

        if self._runs:  # they end with node 0
            ray.wait(self._runs, num_returns=len(self._runs), timeout=_END_SECONDS)
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        if self._owns_connection:
            ray.shutdown()
