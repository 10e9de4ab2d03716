"""Nodes that Ray starts: several raylets of this machine, one of which is killed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.boards.stream_buffer import merge
from actors.engine import nodes
from actors.engine.engine import Engine
from actors.engine.ray_nodes import RayNodes
from actors.protocol.requests import EngineFailed, SamplingParams
from actors.requests.streams import RequestStream
from tests.kits import engines
from tests.kits.real_server import ROOT
from tests.kits.waiting import PATIENCE, until

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
NODE = {"num_cpus": 1, "object_store_memory": 80 * 1024 * 1024, "include_dashboard": False}

small_engine = partial(engines.small_engine, device="cpu", standby_worker=False)


@pytest.fixture
def raylets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster of three nodes with one CPU each."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=NODE)
    try:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        for _ in range(2):
            cluster.add_node(**NODE)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()


async def read_out(stream: RequestStream) -> list[int]:
    async with asyncio.timeout(PATIENCE):
        return list(merge([delta async for delta in stream]).token_ids)


def places() -> list[str]:
    """The machines of the nodes, by Ray's ids; empty without an engine."""
    tables = ray.util.placement_group_table().values()
    made = [table["bundles_to_node_id"] for table in tables if table["state"] == "CREATED"]
    return [place for bundles in made for _, place in sorted(bundles.items())]


def pid_on(engine: Engine, node: int) -> int:
    return next(int(worker["pid"] or 0) for worker in engine.describe()["workers"] if worker["node"] == node)


@pytest.mark.long
async def test_ray_starts_a_node_and_another_when_it_is_lost(tiny_model: Path, raylets: Any) -> None:
    async with small_engine(tiny_model) as engine:
        expected = await read_out(engine.generate("Once upon", LONG))
    async with small_engine(tiny_model, tp=2, nnodes=2, cluster="ray") as engine:
        assert await read_out(engine.generate("Once upon", LONG)) == expected
        before = pid_on(engine, 1)
        _, place = await asyncio.to_thread(places)
        stream = engine.generate("Once upon", LONG)
        first = await anext(stream)
        lost = next(node for node in raylets.list_all_nodes() if node.node_id == place)
        await asyncio.to_thread(raylets.remove_node, lost, allow_graceful=False)
        assert [*first.token_ids, *await read_out(stream)] == expected
        assert (await asyncio.to_thread(places))[1] != place
        after = pid_on(engine, 1)
        assert not psutil.pid_exists(before)
    await until(lambda: not psutil.pid_exists(after), "its worker was left")
    assert not ray.is_initialized()
    await asyncio.to_thread(ray.init, os.environ["RAY_ADDRESS"], configure_logging=False)
    try:
        await until(lambda: ray.available_resources().get("CPU") == 2, "its processors are not free")
        assert not await asyncio.to_thread(places)
    finally:
        ray.shutdown()


@pytest.mark.long
async def test_ray_places_replicas_and_replaces_a_lost_one(tiny_model: Path, raylets: Any) -> None:
    async with small_engine(tiny_model, dp=2, nnodes=2, cluster="ray") as engine:
        expected = await read_out(engine.generate("Once upon", LONG, replica=0))
        before = pid_on(engine, 1)
        stream = engine.generate("Once upon", LONG, replica=1)
        first = await anext(stream)
        _, place = await asyncio.to_thread(places)
        lost = next(node for node in raylets.list_all_nodes() if node.node_id == place)
        await asyncio.to_thread(raylets.remove_node, lost, allow_graceful=False)
        assert [*first.token_ids, *await read_out(stream)] == expected
        await until(lambda: pid_on(engine, 1) not in (0, before), "it did not come back")
        assert await read_out(engine.generate("Once upon", LONG, replica=1)) == expected


@pytest.mark.long
async def test_what_keeps_ray_from_starting_nodes_is_an_error(
    tiny_model: Path, raylets: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "troupe.nodes")
    with pytest.raises(EngineFailed, match="no 4 machines with 1 CPU each"):
        await small_engine(tiny_model, tp=4, nnodes=4, cluster="ray", dist_timeout=2).start()
    assert caplog.text.count("Waiting until the Ray cluster has 4 machines with 1 CPU each") == 1
    assert not ray.is_initialized()
    waiting = small_engine(tiny_model, tp=4, nnodes=4, cluster="ray")
    await waiting.start(wait=False)
    await until(ray.is_initialized, "it does not look for room")
    async with asyncio.timeout(PATIENCE):
        await waiting.aclose()
    monkeypatch.setattr(nodes, "RayNodes", lambda *given, **more: RayNodes(*given, **{**more, "version": "another"}))
    engine = small_engine(tiny_model, tp=2, nnodes=2, cluster="ray")
    with pytest.raises(EngineFailed, match="Node 1 cannot serve: node 0 refused this node: its version is another"):
        await engine.start()
    assert engine.status.permanent
