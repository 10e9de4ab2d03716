"""A model on two nodes, each a process tree of its own: it says what one process says, and outlives each loss."""

from __future__ import annotations

import asyncio
import signal
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from actors.boards.stream_buffer import merge
from actors.engine import report
from actors.engine.engine import Engine
from actors.engine.replica import Replica
from actors.options import ArgumentError, Arguments
from actors.protocol.requests import EngineFailed, SamplingParams
from actors.requests.streams import RequestStream
from tests.kits import engines
from tests.kits.nodes import cluster
from tests.kits.real_server import serving
from tests.kits.replicas import all_decode, halted, replicas, tokens_of
from tests.kits.returned_values import make_sparse_model
from tests.kits.waiting import PATIENCE, until

LONG = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=11, max_tokens=40, ignore_eos=True)

small_engine = partial(engines.small_engine, device="cpu", standby_worker=False)


async def read_out(stream: RequestStream) -> list[int]:
    async with asyncio.timeout(PATIENCE):
        return list(merge([delta async for delta in stream]).token_ids)


async def say(engine: Engine) -> list[list[int]]:
    return [await read_out(engine.generate("Once upon", params)) for params in (LONG, SAMPLED)]


def pid_on(engine: Engine, node: int) -> int:
    """The process of the worker of this node."""
    return next(int(worker["pid"]) for worker in engine.describe()["workers"] if worker["node"] == node)


def words(options: dict[str, Any]) -> list[str]:
    """Keywords as words of a command."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


def end_of(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "losses"),
    [
        ({"tp": 2, "pp": 2}, ("node",)),
        ({"tp": 2, "dp": 2, "enable_dp_attention": True, "enable_expert_parallel": True}, ("node", "connection")),
    ],
    ids=["stages", "parts"],
)
async def test_two_nodes_generate_what_one_process_does_and_one_is_lost(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: dict[str, Any], losses: tuple[str, ...]
) -> None:
    """A request outlives the loss of a node, and of its connection. A dead worker of a node is one whose exit the hub
    reports: see tests/actors/workers/test_nodes.py."""
    model = make_sparse_model(tmp_path / "sparse") if "dp" in ranks else tiny_model
    async with small_engine(model) as engine:
        expected = await say(engine)
    with cluster(tmp_path, monkeypatch) as nodes:
        command = ["--model-path", str(model), "--device", "cpu", *words(ranks)]
        other = nodes.start(*command)
        async with small_engine(model, **ranks, **nodes.options) as engine:
            assert await say(engine) == expected
            remote = pid_on(engine, 1)
            assert psutil.Process(remote).ppid() == other.process.pid
            assert remote not in report.processes(engine).values()
            for loss in losses:
                before = pid_on(engine, 1)
                stream = engine.generate("Once upon", LONG)
                first = await anext(stream)
                if loss == "node":
                    other.signal(signal.SIGKILL)
                    await until(lambda: "Node 1 is not connected" in engine.health().reason, "it is not missed")
                    await until(partial(end_of, before), "its worker was left")
                    other = nodes.start(*command)
                else:
                    hub = engine.hub
                    assert hub is not None
                    hub._nodes[1].lose(": by a test")
                assert [*first.token_ids, *await read_out(stream)] == expected[0]
                assert pid_on(engine, 1) != before
                await until(partial(end_of, before), "its process was left")
            remote = pid_on(engine, 1)
        assert other.wait() == 0
        assert end_of(remote)


def test_ranks_of_a_replica_meet_on_the_host_of_the_first() -> None:
    setup: Any = SimpleNamespace(
        arguments=Arguments.from_keywords(model="m", tp=2, dp=2, nnodes=2, dist_init_addr="h:29500"),
        launcher=SimpleNamespace(host=lambda worker: "fd00::7" if worker.number > 1 else None),
        adapters=tuple,
        adapters_lost=None,
        system=None,
    )
    events: Any = SimpleNamespace(on_refused=None)
    board: Any = None
    made = [Replica(number, setup, board, events) for number in range(2)]
    assert [each._rendezvous() for each in made] == ["h:29501", "[fd00::7]:29502"]


@pytest.mark.long
async def test_a_lost_node_takes_only_its_replica(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [f"The lazy dog {number}" for number in range(4)]
    async with small_engine(tiny_model) as engine:
        expected = [await tokens_of(engine, prompt, LONG) for prompt in prompts]
    with cluster(tmp_path, monkeypatch) as nodes:
        del nodes.options["nccl_port"]  # one rank needs none
        command = ["--model-path", str(tiny_model), "--device", "cpu", "--dp", "2"]
        other = nodes.start(*command)
        async with small_engine(tiny_model, dp=2, **nodes.options) as engine:
            assert [worker["node"] for worker in engine.describe()["workers"]] == [0, 1]
            first, second = replicas(engine)
            readers = [asyncio.create_task(tokens_of(engine, prompt, LONG)) for prompt in prompts]
            await all_decode(engine, len(prompts))
            assert len(second.journal) == 2
            with halted(engine, 0):
                other.signal(signal.SIGKILL)
                await until(lambda: len(first.journal) == 4, "they did not move")
            assert (second.board.worker, engine.health().reason) == (None, "ok")
            async with asyncio.timeout(PATIENCE):
                assert await asyncio.gather(*readers) == expected
            other = nodes.start(*command)
            await until(lambda: second.board.worker is not None, "it did not come back")
            assert await read_out(engine.generate(prompts[0], LONG, replica=1)) == expected[0][0][0]
        assert other.wait() == 0


@pytest.mark.long
def test_a_node_serves_the_next_node_0_after_a_crash_of_the_first(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 20, "ignore_eos": True, "temperature": 0}
    texts = []
    with cluster(tmp_path, monkeypatch) as nodes:
        given = ["--model-path", str(tiny_model), "--device", "cpu", "--tp", "2", "--dtype", "float32"]
        other = nodes.start(*given)
        for crash in (True, False):
            server = serving(tmp_path / f"log-{crash}", *given, "--cpu-threads", "1", *words(nodes.options))
            try:
                server.wait_ready()
                texts.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE).json()["choices"])
                workers = psutil.Process(other.process.pid).children()
                assert workers
                if crash:
                    server.process.kill()
                    psutil.wait_procs(workers, PATIENCE)
                    assert other.process.poll() is None
            finally:
                server.stop()
        assert texts[0] == texts[1]
        assert other.wait() == 0


async def test_an_engine_of_several_nodes_needs_their_secret(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"tp": 2, "nnodes": 2, "dist_init_addr": "127.0.0.1:29500"}
    for secret in ("", "short"):
        monkeypatch.setenv("TROUPE_CLUSTER_SECRET", secret)
        with pytest.raises(ArgumentError, match="TROUPE_CLUSTER_SECRET"):
            small_engine(tiny_model, **options)
    monkeypatch.setenv("TROUPE_CLUSTER_SECRET", "long enough for this test")
    with pytest.raises(ArgumentError, match="node_rank"):
        small_engine(tiny_model, **options, node_rank=1)


async def test_an_engine_that_waits_for_a_node_says_so_and_can_be_closed(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster(tmp_path, monkeypatch) as nodes:
        engine = small_engine(tiny_model, tp=2, standby_worker=True, **nodes.options)
        await engine.start(wait=False)
        await until(lambda: engine.intake is not None, "its actors did not start")
        health = engine.health()
        assert (health.ok, health.reason) == (False, "Node 1 is not connected; its workers start when it connects.")
        async with asyncio.timeout(PATIENCE):
            await engine.aclose()
        assert engine.status.phase == "stopped"


async def test_ray_needs_several_nodes_and_its_package(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TROUPE_CLUSTER_SECRET", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ArgumentError, match="cluster needs nnodes"):
        small_engine(tiny_model, tp=2, cluster="ray")
    engine = small_engine(tiny_model, tp=2, nnodes=2, cluster="ray")
    assert engine.arguments.dist_init_addr
    with pytest.raises(EngineFailed, match="--cluster ray needs its package"):
        await engine.start()
    assert engine.status.permanent
