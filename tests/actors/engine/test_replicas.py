"""Several replicas of a model in one engine."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.boards.journal import Journal
from actors.engine.engine import Engine
from actors.options import ArgumentError
from actors.protocol.requests import Delta, SamplingParams
from actors.requests.router import Route, Router
from kernels.contract.topology import Rank
from tests.kits.engines import small_engine
from tests.kits.waiting import until

PARAMS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


async def tokens_of(engine: Engine, prompt: str) -> tuple[int, ...]:
    deltas: list[Delta] = [delta async for delta in engine.generate(prompt, PARAMS)]
    return tuple(token for delta in deltas for token in delta.token_ids)


def _decodes(journal: Journal) -> bool:
    return all(len(entry.output) > 5 for entry in journal.live())


async def test_a_death_in_one_replica_loses_no_request_of_either(tiny_model: Path) -> None:
    prompts = [f"The lazy dog {i}" for i in range(8)]
    async with small_engine(tiny_model) as engine:
        expected = [await tokens_of(engine, prompt) for prompt in prompts]
    async with small_engine(tiny_model, replicas=2, standby_worker=True) as engine:
        assert [worker["name"] for worker in engine.describe()["workers"]] == ["worker-0", "worker-1"]
        assert [worker["rank"]["dp"] for worker in engine.describe()["workers"]] == [0, 1]
        assert {worker["role"] for worker in engine.describe()["workers"]} == {"both"}
        assert [worker.rank for worker in engine.worker_ids.values()] == [Rank(dp=0), Rank(dp=1)]
        names = [actor.name for actor in engine.actors()]
        assert {"scheduler", "cache", "detokenizer", "scheduler-1", "cache-1", "detokenizer-1"} <= set(names)
        assert engine._actor_tree is not None
        first, second = engine._actor_tree.replicas
        readers = [asyncio.create_task(tokens_of(engine, prompt)) for prompt in prompts]
        live = [first.journal, second.journal]
        await until(lambda: sum(map(len, live)) == 8 and all(_decodes(journal) for journal in live), "not all decode")
        assert (len(first.journal), len(second.journal)) == (4, 4)
        assert engine.describe()["scheduler"]["running"] == 8
        os.kill(engine.describe()["workers"][1]["pid"], signal.SIGKILL)
        async with asyncio.timeout(120):
            assert await asyncio.gather(*readers) == expected
        assert [worker["restarts"] for worker in engine.describe()["workers"]] == [0, 1]
        assert engine.health().ok
        usage = engine.board.cache()
        assert usage is not None
        assert usage.total == sum(each.board.cache().total for each in (first, second))  # type: ignore[union-attr]
        assert await engine.flush_cache()


def test_several_replicas_cannot_meet_at_one_address(tiny_model: Path) -> None:
    with pytest.raises(ArgumentError, match="dist_init_addr"):
        Engine(model=str(tiny_model), device="cpu", replicas=2, dist_init_addr="127.0.0.1:29500")
    with pytest.raises(ArgumentError, match="replicas"):
        Engine(model=str(tiny_model), replicas=0)


def route(live: int, *, ready: bool) -> Route:
    board: Any = SimpleNamespace(worker=(None, 0) if ready else None)
    journal = Journal()
    for number in range(live):
        entry: Any = SimpleNamespace(sequence=number)
        journal.open(entry)
    scheduler: Any = None
    return Route(scheduler, journal, board)


def test_a_router_takes_the_replica_with_the_fewest_live_sequences() -> None:
    busy, idle, loading = route(3, ready=True), route(1, ready=True), route(0, ready=False)
    assert Router([busy, idle, loading]).choose() is idle
    assert Router([busy, loading]).choose() is busy
    assert Router([loading]).choose() is loading
    assert Router([route(2, ready=False), loading]).choose() is loading
    with pytest.raises(ValueError, match="at least one"):
        Router([])
