"""The nodes of an engine: the launcher of its workers, and what runs on the other nodes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import AsyncIterator

import msgspec

from actors.engine import report
from actors.engine.lifecycle import Lifecycle
from actors.engine.opening import open_model
from actors.engine.ray_nodes import RayNodes
from actors.options import ArgumentError, Arguments
from actors.workers.early_workers import EarlyWorkers
from actors.workers.launchers.launcher import WorkerLauncher
from actors.workers.launchers.local import LocalLauncher
from actors.workers.nodes.agent import NodeAgent
from actors.workers.nodes.handshake import SECRET_VARIABLE, cluster_secret
from actors.workers.nodes.hub import Hub
from actors.workers.placement import place

__all__ = ["run_node", "with_nodes", "worker_launcher"]

_TRIES = 32


def with_nodes(arguments: Arguments) -> Arguments:
    """The arguments of an engine; with --cluster, it chooses where the nodes meet. Raises ArgumentError on a node other
    than 0, or without the secret of its nodes."""
    if arguments.node_rank:
        raise ArgumentError(["node_rank: Engine runs on node 0; start the other nodes with the command troupe serve"])
    if arguments.cluster is not None:
        return arguments if arguments.dist_init_addr is not None else _with_address(arguments)
    if arguments.nnodes > 1:
        cluster_secret(os.environ)
    return arguments


def _with_address(arguments: Arguments) -> Arguments:
    """The arguments with this machine's address and free ports: one for the nodes, and consecutive ones for the ranks
    of the replicas."""
    with contextlib.ExitStack() as stack:
        probe = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        try:
            probe.connect(("192.0.2.1", 9))  # of no machine; sends nothing
            host = probe.getsockname()[0]
        except OSError:  # no network
            host = "127.0.0.1"
        control = stack.enter_context(socket.socket())
        control.bind((host, 0))
        port = control.getsockname()[1]
        ranks = arguments.nccl_port
        if ranks is None and arguments.tensor_parallel_size * arguments.pipeline_parallel_size > 1:
            ranks = _ports_in_a_row(host, 1 if arguments.enable_dp_attention else arguments.data_parallel_size)
    return msgspec.structs.replace(arguments, dist_init_addr=f"{host}:{port}", nccl_port=ranks)


def _ports_in_a_row(host: str, count: int) -> int:
    """The first of ``count`` consecutive free ports; any free port if none are found."""
    first = 0
    for _ in range(_TRIES):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            held = [stack.enter_context(socket.socket()) for _ in range(count)]
            held[0].bind((host, 0))
            first = int(held[0].getsockname()[1])
            for number, each in enumerate(held[1:], 1):
                each.bind((host, first + number))
            return first
    return first


@contextlib.asynccontextmanager
async def worker_launcher(
    arguments: Arguments, early: EarlyWorkers | None, lifecycle: Lifecycle
) -> AsyncIterator[WorkerLauncher]:
    """The launcher of this engine's workers. At the end the other nodes end, too. Raises ArgumentError."""
    local = LocalLauncher(early)
    if arguments.nnodes == 1:
        yield local
        return
    version, placement = report.version(), place(arguments, os.environ)
    one_use = arguments.cluster is not None and SECRET_VARIABLE not in os.environ
    secret = secrets.token_hex(32).encode() if one_use else cluster_secret(os.environ)
    hub = Hub(arguments, version=version, device=placement.label, secret=secret, local=local)
    async with contextlib.AsyncExitStack() as stack:
        if arguments.cluster is not None:
            nodes = RayNodes(arguments, lifecycle, device=placement.device, version=version, secret=secret)
            await stack.enter_async_context(nodes)
        try:
            await stack.enter_async_context(hub)
        except OSError as error:
            raise ArgumentError([f"cannot listen at --dist-init-addr {arguments.dist_init_addr}: {error}"]) from error
        try:
            yield hub
        finally:
            hub.failed = lifecycle.phase == "failed"


async def run_node(arguments: Arguments) -> bool:
    """Serve node 0 with the workers of this node until that ends; returns whether it ended in order.

    The model is opened first: it is downloaded if it is a hub id. Raises ArgumentError, ModelPathError or NodeError.
    """
    secret = cluster_secret(os.environ)
    opened = await open_model(arguments)
    model = await asyncio.to_thread(opened.fingerprint, arguments)
    agent = NodeAgent(arguments, place(arguments, os.environ), version=report.version(), secret=secret, model=model)
    return await agent.run()
