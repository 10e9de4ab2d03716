"""Several replicas of a model in one engine."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.boards.journal import Journal
from actors.engine.engine import Engine
from actors.engine.replica import Replica
from actors.faults import Fault, FaultPlan
from actors.options import ArgumentError
from actors.protocol.requests import Grammar, InvalidRequest, RequestAborted, RequestFailed, SamplingParams
from actors.requests.router import METHODS, Route, Router
from actors.runtime import ChildCrash
from app.understudy import MODEL_DIR
from kernels.contract.topology import Rank
from tests.kits.engines import rest, small_engine
from tests.kits.replicas import all_decode, alone, halted, kill, replicas, tokens_of
from tests.kits.waiting import PATIENCE, until

PARAMS = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
PROMPTS = [f"The lazy dog {i}" for i in range(8)]


async def test_requests_of_a_dead_replica_go_on_in_the_other(tiny_model: Path) -> None:
    expected = await alone(tiny_model, PROMPTS, PARAMS)
    async with small_engine(tiny_model, dp=2) as engine:
        assert [worker["name"] for worker in engine.describe()["workers"]] == ["worker-0", "worker-1"]
        assert [worker["rank"]["dp"] for worker in engine.describe()["workers"]] == [0, 1]
        assert {worker["role"] for worker in engine.describe()["workers"]} == {"both"}
        assert [worker.rank for worker in engine.worker_ids.values()] == [Rank(dp=0), Rank(dp=1)]
        names = [actor.name for actor in engine.actors()]
        assert {"scheduler", "cache", "detokenizer", "scheduler-1", "cache-1", "detokenizer-1"} <= set(names)
        first, second = replicas(engine)
        readers = [asyncio.create_task(tokens_of(engine, prompt, PARAMS)) for prompt in PROMPTS]
        await all_decode(engine)
        assert (len(first.journal), len(second.journal)) == (4, 4)
        assert engine.describe()["scheduler"]["running"] == 8
        timelines = [entry.timeline for entry in second.journal.live()]
        with halted(engine, 0):
            kill(engine, 1)
            await until(lambda: len(first.journal) == 8, "they did not move")
            assert second.board.worker is None  # nothing waits for its restart
        async with asyncio.timeout(PATIENCE):
            assert await asyncio.gather(*readers) == expected
        for timeline in timelines:
            assert [mark.name for mark in timeline.marks] == ["first_token", "worker_died", "handed_over", "resumed"]
        await until(lambda: second.board.worker is not None, "it did not come back")
        assert [worker["restarts"] for worker in engine.describe()["workers"]] == [0, 1]
        assert engine.health().ok
        usage = engine.board.cache()
        assert usage is not None
        assert usage.total == sum(each.board.cache().total for each in (first, second))  # type: ignore[union-attr]
        assert await engine.flush_cache()


async def test_deaths_of_all_replicas_lose_no_request(tiny_model: Path) -> None:
    expected = await alone(tiny_model, PROMPTS, PARAMS)
    async with small_engine(tiny_model, dp=2) as engine:
        readers = [asyncio.create_task(tokens_of(engine, prompt, PARAMS)) for prompt in PROMPTS]
        await all_decode(engine)
        kill(engine, 0)
        kill(engine, 1)
        async with asyncio.timeout(PATIENCE):
            assert await asyncio.gather(*readers) == expected
        await rest(engine)


async def _moved_by_a_death(engine: Engine, old: Replica, new: Replica) -> None:
    """Kill the workers of ``old`` in a pause, and wait until all three requests go on in ``new``."""
    await engine.pause_generation("in_place")
    await until(lambda: new.board.worker is not None, "it did not come back")
    before = sum(len(entry.output) for each in (old, new) for entry in each.journal.live())
    kill(engine, old.number)
    await until(lambda: len(new.journal) == 3, "they did not move")
    await engine.continue_generation()
    await until(lambda: sum(len(entry.output) for entry in new.journal.live()) > before + 9, "they do not go on")


async def test_a_request_that_comes_back_keeps_its_text(tiny_model: Path) -> None:
    expected = await alone(tiny_model, PROMPTS[:3], PARAMS)
    async with small_engine(tiny_model, dp=2) as engine:
        first, second = replicas(engine)
        readers = [asyncio.create_task(tokens_of(engine, prompt, PARAMS)) for prompt in PROMPTS[:3]]
        await all_decode(engine, 3)
        await _moved_by_a_death(engine, first, second)
        await _moved_by_a_death(engine, second, first)
        async with asyncio.timeout(PATIENCE):
            assert await asyncio.gather(*readers) == expected


async def test_a_hanging_replica_is_left(tiny_model: Path) -> None:
    expected = await alone(tiny_model, PROMPTS, PARAMS)
    async with small_engine(tiny_model, dp=2, watchdog_timeout=3.0) as engine:
        readers = [asyncio.create_task(tokens_of(engine, prompt, PARAMS)) for prompt in PROMPTS]
        await all_decode(engine)
        os.kill(engine.describe()["workers"][0]["pid"], signal.SIGSTOP)
        async with asyncio.timeout(PATIENCE):
            assert await asyncio.gather(*readers) == expected
        await rest(engine)


async def test_a_harmful_request_is_found_across_replicas(tiny_model: Path) -> None:
    others: list[Any] = [*PROMPTS[:4], [1, 2, 3, 4], list(range(10, 60))]
    expected = await alone(tiny_model, others, PARAMS)
    with FaultPlan(Fault("decode", "kill", mark=7)) as plan:
        async with small_engine(tiny_model, dp=2, faults=plan) as engine:
            readers = [asyncio.create_task(tokens_of(engine, prompt, PARAMS)) for prompt in [*others, [7] * 20]]
            async with asyncio.timeout(PATIENCE):
                *answers, harmful = await asyncio.gather(*readers, return_exceptions=True)
            assert isinstance(harmful, RequestFailed)
            assert answers == expected
            await rest(engine)
            assert not any(len(each.journal.suspects) + len(each.journal.arriving) for each in replicas(engine))


async def test_a_broken_replica_does_not_end_the_others(tiny_model: Path) -> None:
    async with small_engine(tiny_model, dp=2, max_worker_restarts=1) as engine:
        first, _ = replicas(engine)
        for _ in range(3):
            await until(lambda: first.board.worker is not None, "it did not come back")
            kill(engine, 0)
            await until(lambda: first.board.worker is None, "it is still alive")
            assert len((await tokens_of(engine, "Once", PARAMS))[0][0]) == 100
        assert engine.status.phase == "ready"


async def test_a_pause_does_not_wait_for_a_dead_replica(tiny_model: Path) -> None:
    expected = await alone(tiny_model, PROMPTS[:4], PARAMS)
    async with small_engine(tiny_model, dp=2) as engine:
        first, second = replicas(engine)
        readers = [asyncio.create_task(tokens_of(engine, prompt, PARAMS)) for prompt in PROMPTS[:4]]
        await all_decode(engine, 4)
        with halted(engine, 1):
            kill(engine, 0)
            await until(lambda: len(second.journal) == 4, "they did not move")
        assert first.board.worker is None
        await engine.pause_generation("in_place")
        assert first.board.worker is None
        await engine.continue_generation()
        async with asyncio.timeout(PATIENCE):
            assert await asyncio.gather(*readers) == expected


async def test_choices_and_grammars_move(tiny_model: Path) -> None:
    params = SamplingParams(max_tokens=200, n=3, seed=5, temperature=1.0, grammar=Grammar("regex", "(ab|cd){60}"))
    expected = await alone(MODEL_DIR, ["Once upon a time"], params)
    async with small_engine(MODEL_DIR, dp=2) as engine:
        first, second = replicas(engine)
        reader = asyncio.create_task(tokens_of(engine, "Once upon a time", params))
        await all_decode(engine, 3)
        old, new = (0, 1) if len(first.journal) else (1, 0)
        kill(engine, old)
        await until(lambda: len(replicas(engine)[new].journal) == 3, "they did not move")
        async with asyncio.timeout(PATIENCE):
            assert [await reader] == expected
        assert len(first.journal) == len(second.journal) == 0


async def test_a_request_that_moved_can_be_aborted_and_outlives_a_scheduler(tiny_model: Path) -> None:
    expected = await alone(tiny_model, PROMPTS, PARAMS)
    async with small_engine(tiny_model, dp=2) as engine:
        readers = [asyncio.create_task(tokens_of(engine, prompt, PARAMS)) for prompt in PROMPTS]
        aborted = asyncio.create_task(tokens_of(engine, "to be aborted", PARAMS))
        await all_decode(engine, 9)
        assert engine.intake is not None
        [moving] = [request for request in engine.intake._requests.values() if request.prompt == "to be aborted"]
        assert moving.route is not None
        replica = next(each for each in replicas(engine) if each.route is moving.route)
        other = next(each for each in replicas(engine) if each is not replica)
        assert engine._system is not None
        with halted(engine, other.number):
            kill(engine, replica.number)
            await until(lambda: moving.route is not replica.route, "it did not move")
            engine._system.crash_actor(other.scheduler, ChildCrash("a test"))
            assert await engine.abort(moving.buffer.request_id) == 1
        with pytest.raises(RequestAborted):
            await aborted
        async with asyncio.timeout(PATIENCE):
            assert await asyncio.gather(*readers) == expected
        await rest(engine)


@pytest.mark.long
async def test_replicas_of_two_ranks(tiny_model: Path) -> None:
    expected = await alone(tiny_model, PROMPTS, PARAMS)
    async with small_engine(tiny_model, dp=2, tp=2) as engine:
        assert [worker.rank for worker in engine.worker_ids.values()] == [
            *(Rank(dp=0, tp=0), Rank(dp=0, tp=1), Rank(dp=1, tp=0), Rank(dp=1, tp=1))
        ]
        first, second = replicas(engine)
        readers = [asyncio.create_task(tokens_of(engine, prompt, PARAMS)) for prompt in PROMPTS]
        await all_decode(engine)
        with halted(engine, 0, 1):
            kill(engine, 3)  # rank 1 of the second replica
            await until(lambda: len(first.journal) == 8, "they did not move")
            assert second.board.worker is None
        async with asyncio.timeout(PATIENCE):
            assert await asyncio.gather(*readers) == expected
        await until(lambda: second.board.worker is not None, "it did not come back")
        await rest(engine)


def test_several_replicas_cannot_meet_at_one_address(tiny_model: Path) -> None:
    with pytest.raises(ArgumentError, match="dist_init_addr"):
        Engine(model=str(tiny_model), device="cpu", dp=2, tp=2, dist_init_addr="127.0.0.1:29500")
    with pytest.raises(ArgumentError, match="dp: must be"):
        Engine(model=str(tiny_model), dp=0)
    with pytest.raises(ArgumentError, match="prefill_round_robin_balance"):
        Engine(model=str(tiny_model), dp=2, load_balance_method="total_tokens", prefill_round_robin_balance=True)


# -- the router


def route(live: int, *, ready: bool = True, tokens: int = 1, number: int = 0) -> Route:
    board: Any = SimpleNamespace(worker=(None, 0) if ready else None)
    journal = Journal()
    for index in range(live):
        add(journal, tokens, index)
    scheduler: Any = None
    return Route(scheduler, journal, board, number=number)


def add(journal: Journal, tokens: int, sequence: int) -> None:
    entry: Any = SimpleNamespace(sequence=sequence, prompt_ids=[0] * tokens, output=[])
    journal.open(entry)


def prompt(*parts: tuple[int, int]) -> bytes:
    """Token ids: (value, count) each."""
    return np.concatenate([np.full(count, value, dtype=np.int32) for value, count in parts]).tobytes()


def test_a_router_takes_the_replica_with_the_fewest_live_sequences() -> None:
    busy, idle, loading = route(3), route(1), route(0, ready=False)
    method = "total_requests"
    assert Router([busy, idle, loading], method).choose() is idle
    assert Router([busy, loading], method).choose() is busy
    assert Router([loading], method).choose() is loading
    assert Router([route(2, ready=False), loading], method).choose() is loading
    with pytest.raises(ValueError, match="at least one"):
        Router([])
    with pytest.raises(ValueError, match="no method"):
        Router([busy], "random")


def test_a_router_takes_the_replica_with_the_fewest_live_tokens() -> None:
    few, many = route(3, tokens=10), route(1, tokens=100)
    assert Router([many, few], "total_tokens").choose() is few
    assert few.journal.tokens == 30
    few.journal._close(0)
    assert few.journal.tokens == 20


def test_a_router_leaves_a_named_replica_while_its_workers_load() -> None:
    loading, ready = route(0, ready=False), route(5, number=1)
    assert Router([loading, ready], "total_requests").choose(replica=0) is ready
    assert Router([loading, ready], "total_requests").choose(replica=1) is ready
    assert Router([loading, loading], "total_requests").choose(replica=0) is loading


def test_a_router_takes_replicas_in_turn() -> None:
    routes = [route(5), route(0), route(0, ready=False)]
    router = Router(routes, "round_robin")
    assert {id(router.choose()) for _ in range(2)} == {id(each) for each in routes[:2]}


def test_a_router_follows_the_longest_cached_prefix() -> None:
    routes = [route(0, number=number) for number in range(3)]
    boards: list[Any] = [each.board for each in routes]
    router = Router(routes, "cache_aware")
    system, other = (7, 256), (8, 256)
    first = router.choose(prompt(system, (1, 100)))
    add(first.journal, 356, 1)
    assert router.choose(prompt(other, (1, 100))) is not first
    assert router.choose(prompt(system, (2, 100))) is first
    assert router.choose(prompt(system, (2, 100)), salt=b"another tenant") is not first
    # A longer prefix that another replica has seen comes before the system prompt.
    second = next(each for each in routes if each is not first)
    for board in boards:
        board.worker = (None, 0) if board is second.board else None
    assert router.choose(prompt(system, (3, 128))) is second
    for board in boards:
        board.worker = (None, 0)
    assert router.choose(prompt(system, (3, 128), (4, 10))) is second
    # An overloaded replica gets no more of them, and one with a new worker has an empty cache.
    add(first.journal, 100_000, 2)
    assert router.choose(prompt(system, (2, 100))) is not first
    # One without room gets none, however few tokens it has.
    small = Router(routes, "cache_aware", max_running=2)
    third = small.choose(prompt(other))
    assert small.choose(prompt(other)) is third
    for sequence in (10, 11):
        add(third.journal, 1, sequence)
    assert small.choose(prompt(other)) is not third
    boards[second.number].worker = (None, 1)
    add(second.journal, 1, 3)
    assert router.choose(prompt(system, (3, 128), (4, 10))) is not second


@pytest.mark.parametrize("method", METHODS)
async def test_each_method_serves(tiny_model: Path, method: str) -> None:
    async with small_engine(tiny_model, dp=2, load_balance_method=method) as engine:
        assert engine.intake is not None
        assert engine.intake._router._method == method
        assert len((await tokens_of(engine, "Once", PARAMS))[0][0]) == 100


async def test_prompts_in_turn_are_round_robin(tiny_model: Path) -> None:
    async with small_engine(tiny_model, dp=2, prefill_round_robin_balance=True) as engine:
        assert engine.intake is not None
        assert engine.intake._router._method == "round_robin"


async def test_a_request_runs_on_the_replica_that_it_names(tiny_model: Path) -> None:
    async with small_engine(tiny_model, dp=2) as engine:
        first, second = replicas(engine)
        streams = [engine.generate(f"Once {i}", PARAMS, replica=1) for i in range(3)]
        for stream in streams:
            await stream.ready()
        assert (len(first.journal), len(second.journal)) == (0, 3)
        for stream in streams:
            await stream.aclose()
        with pytest.raises(InvalidRequest, match="data_parallel_rank: 2, but replicas are numbered") as refused:
            engine.generate("Once", PARAMS, replica=2)
        assert refused.value.param == "data_parallel_rank"
