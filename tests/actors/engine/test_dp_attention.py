"""Data-parallel attention: replicas with requests of their own whose workers share layers of experts."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from actors.engine.engine import Engine
from actors.faults import Fault, FaultPlan
from actors.options import ArgumentError
from actors.protocol.requests import RequestFailed, SamplingParams
from actors.runtime import ChildCrash
from kernels.contract.topology import Rank
from tests.kits.engines import rest, small_engine
from tests.kits.replicas import all_decode, kill, replicas, tokens_of
from tests.kits.returned_values import make_sparse_model
from tests.kits.waiting import until

PARAMS = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
PROMPTS: list[Any] = [*(f"The lazy dog {i}" for i in range(5)), list(range(30, 180)), [7, 8, 9], list(range(30, 190))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sparse_model(tmp_path_factory.mktemp("sparse"))


def shared(model: Path, tp: int = 2, **keywords: Any) -> Engine:
    return small_engine(model, tp=tp, dp=2, enable_dp_attention=True, **keywords)


async def alone(model: Path, prompts: list[Any], params: SamplingParams = PARAMS) -> list[Any]:
    async with small_engine(model) as engine:
        return [await tokens_of(engine, prompt, params) for prompt in prompts]


async def test_replicas_that_share_experts_generate_what_one_device_does(model: Path) -> None:
    """Also with one of them idle, in chunks, and with prompts that lie in the prefix cache."""
    expected = await alone(model, PROMPTS)
    async with shared(model) as engine:
        assert [worker.rank for worker in engine.worker_ids.values()] == [Rank(dp=0), Rank(dp=1)]
        assert await tokens_of(engine, PROMPTS[5], PARAMS) == expected[5]
        for _ in range(2):
            async with asyncio.timeout(120):
                assert await asyncio.gather(*(tokens_of(engine, prompt, PARAMS) for prompt in PROMPTS)) == expected
        usage = engine.board.cache()
        assert usage is not None
        assert usage.hit_tokens > 0
        first, second = replicas(engine)
        assert all(each.board.cache().queried_tokens for each in (first, second))  # type: ignore[union-attr]
        await rest(engine)
        assert await engine.flush_cache()


async def test_four_ranks_divide_two_attentions(model: Path) -> None:
    expected = await alone(model, PROMPTS[:4])
    async with shared(model, tp=4) as engine:
        assert [worker.rank for worker in engine.worker_ids.values()] == [
            *(Rank(dp=0, tp=0), Rank(dp=0, tp=1), Rank(dp=1, tp=0), Rank(dp=1, tp=1))
        ]
        async with asyncio.timeout(120):
            assert await asyncio.gather(*(tokens_of(engine, prompt, PARAMS) for prompt in PROMPTS[:4])) == expected
        await rest(engine)


async def test_requests_of_all_replicas_go_on_after_a_death(model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    expected = await alone(model, PROMPTS, params)
    async with shared(model) as engine:
        readers = [asyncio.create_task(tokens_of(engine, prompt, params)) for prompt in PROMPTS]
        await all_decode(engine)
        kill(engine, 1)
        await until(lambda: engine.board.worker is None, "the others live")
        async with asyncio.timeout(120):
            assert await asyncio.gather(*readers) == expected
        assert all(worker["restarts"] for worker in engine.describe()["workers"])
        await rest(engine)


async def test_a_scheduler_that_dies_does_not_stop_the_other(model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    expected = await alone(model, PROMPTS, params)
    async with shared(model) as engine:
        readers = [asyncio.create_task(tokens_of(engine, prompt, params)) for prompt in PROMPTS]
        await all_decode(engine)
        assert engine._system is not None
        engine._system.crash_actor(replicas(engine)[1].scheduler, ChildCrash("a test"))
        async with asyncio.timeout(120):
            assert await asyncio.gather(*readers) == expected
        assert [worker["restarts"] for worker in engine.describe()["workers"]] == [0, 0]
        await rest(engine)


async def test_a_hanging_rank_is_replaced_with_all_others(model: Path) -> None:
    expected = await alone(model, PROMPTS)
    async with shared(model, watchdog_timeout=5.0) as engine:
        readers = [asyncio.create_task(tokens_of(engine, prompt, PARAMS)) for prompt in PROMPTS]
        await all_decode(engine)
        os.kill(engine.describe()["workers"][1]["pid"], signal.SIGSTOP)
        async with asyncio.timeout(120):
            assert await asyncio.gather(*readers) == expected
        await rest(engine)


async def test_only_the_harmful_request_of_a_replica_fails(model: Path) -> None:
    expected = await alone(model, PROMPTS[:5])
    with FaultPlan(Fault("decode", "kill", mark=7)) as plan:
        async with shared(model, faults=plan) as engine:
            readers = [asyncio.create_task(tokens_of(engine, prompt, PARAMS)) for prompt in [*PROMPTS[:5], [7] * 20]]
            async with asyncio.timeout(240):
                *answers, harmful = await asyncio.gather(*readers, return_exceptions=True)
            assert isinstance(harmful, RequestFailed)
            assert answers == expected
            await rest(engine)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tp": 2}, "needs data_parallel_size"),
        ({"tp": 3, "dp": 2}, "divides tensor_parallel_size, 3"),
        ({"tp": 2, "dp": 2, "speculative_algorithm": "NGRAM"}, "contradicts speculative_algorithm"),
    ],
    ids=str,
)
def test_attention_that_cannot_be_divided_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        Engine(model="model", enable_dp_attention=True, **options)
