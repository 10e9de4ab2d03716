"""An engine whose workers have some experts each: it says what one worker says, and outlives the death of either."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from actors.boards.stream_buffer import merge
from actors.engine.engine import Engine
from actors.engine.report import readings
from actors.protocol.requests import SamplingParams
from kernels.contract.topology import Rank
from tests.kits.engines import small_engine
from tests.kits.returned_values import make_sparse_model
from tests.kits.waiting import PATIENCE

PROMPTS = [list(range(30, 130)), list(range(30, 120)), [5, 6, 7]]  # chunks of 64 tokens, and a prefix of the first
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sparse_model(tmp_path_factory.mktemp("sparse"))


async def say(engine: Engine, prompt: list[int], params: SamplingParams = PARAMS) -> list[int]:
    async with asyncio.timeout(PATIENCE):
        return list(merge([delta async for delta in engine.generate(prompt, params)]).token_ids)


@pytest.mark.long
async def test_two_workers_with_half_of_the_experts_are_replaced_together(model: Path) -> None:
    async with small_engine(model) as engine:
        expected = [await say(engine, prompt) for prompt in PROMPTS]
        long = await say(engine, PROMPTS[2], LONG)
    async with small_engine(model, tp_size=2, enable_expert_parallel=True) as engine:
        assert [worker.rank for worker in engine.worker_ids.values()] == [Rank(tp=0, ep=0), Rank(tp=1, ep=1)]
        assert [await say(engine, prompt) for prompt in PROMPTS] == expected
        for rank in (1, 0):
            before = [int(worker["pid"] or 0) for worker in engine.describe()["workers"]]
            stream = engine.generate(PROMPTS[2], LONG)
            first = await anext(stream)
            os.kill(before[rank], signal.SIGKILL)
            async with asyncio.timeout(PATIENCE):
                assert [*first.token_ids, *merge([delta async for delta in stream]).token_ids] == long
        assert [await say(engine, prompt) for prompt in PROMPTS] == expected


@pytest.mark.long
async def test_no_request_is_lost_when_a_worker_dies_among_rebalances(model: Path) -> None:
    """The workers that come back have the first placement, and experts move again."""
    async with small_engine(model) as engine:
        expected, long = [await say(engine, prompt) for prompt in PROMPTS], await say(engine, PROMPTS[2], LONG)
    options = {"ep_num_redundant_experts": 2, "ep_dispatch_algorithm": "dynamic", "eplb_rebalance_num_iterations": 7}
    async with small_engine(model, tp_size=2, ep_size=2, enable_eplb=True, **options) as engine:
        (board,) = engine.board.all
        for rank in (1, 0):
            moved = board.moved_experts
            assert [await say(engine, prompt) for prompt in PROMPTS] == expected
            assert board.moved_experts > moved
            before = [int(worker["pid"] or 0) for worker in engine.describe()["workers"]]
            stream = engine.generate(PROMPTS[2], LONG)
            first = await anext(stream)
            os.kill(before[rank], signal.SIGKILL)
            async with asyncio.timeout(PATIENCE):
                assert [*first.token_ids, *merge([delta async for delta in stream]).token_ids] == long
        moves, used = (readings(engine)[f"troupe_expert_{name}"] for name in ("moves_total", "rank_utilization"))
        assert isinstance(moves, Mapping)
        assert isinstance(used, Mapping)
        assert moves[("0",)] == board.moved_experts
        assert 0 < used[("0",)] <= 1
