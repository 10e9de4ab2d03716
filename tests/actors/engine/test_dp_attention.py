"""Data-parallel attention: replicas with requests of their own whose workers share layers of experts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from actors.engine.engine import Engine
from actors.faults import Fault, FaultPlan
from actors.options import ArgumentError
from actors.protocol.requests import RequestFailed, SamplingParams
from actors.runtime import ChildCrash
from kernels.contract.topology import Rank
from tests.kits.adapters import adapted_modules, merged, save_adapter
from tests.kits.engines import rest, small_engine
from tests.kits.replicas import all_decode, alone, kill, replicas, tokens_of
from tests.kits.returned_values import make_sparse_model
from tests.kits.waiting import PATIENCE

PARAMS = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
PROMPTS: list[Any] = [*(f"The lazy dog {i}" for i in range(5)), list(range(30, 180)), [7, 8, 9], list(range(30, 190))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sparse_model(tmp_path_factory.mktemp("sparse"))


def shared(model: Path, tp: int = 2, **keywords: Any) -> Engine:
    return small_engine(model, tp=tp, dp=2, enable_dp_attention=True, **keywords)


async def test_replicas_that_share_experts_generate_what_one_device_does(model: Path) -> None:
    """Also with one of them idle, in chunks, and with prompts that lie in the prefix cache."""
    expected = await alone(model, PROMPTS, PARAMS)
    async with shared(model) as engine:
        assert [worker.rank for worker in engine.worker_ids.values()] == [Rank(dp=0), Rank(dp=1)]
        assert await tokens_of(engine, PROMPTS[5], PARAMS) == expected[5]
        for _ in range(2):
            async with asyncio.timeout(PATIENCE):
                assert await asyncio.gather(*(tokens_of(engine, prompt, PARAMS) for prompt in PROMPTS)) == expected
        usage = engine.board.cache()
        assert usage is not None
        assert usage.hit_tokens > 0
        first, second = replicas(engine)
        assert all(each.board.cache().queried_tokens for each in (first, second))  # type: ignore[union-attr]
        await rest(engine)
        assert await engine.flush_cache()


async def test_four_ranks_divide_two_attentions(model: Path) -> None:
    expected = await alone(model, PROMPTS[:4], PARAMS)
    async with shared(model, tp=4) as engine:
        assert [worker.rank for worker in engine.worker_ids.values()] == [
            *(Rank(dp=0, tp=0), Rank(dp=0, tp=1), Rank(dp=1, tp=0), Rank(dp=1, tp=1))
        ]
        async with asyncio.timeout(PATIENCE):
            assert await asyncio.gather(*(tokens_of(engine, prompt, PARAMS) for prompt in PROMPTS[:4])) == expected
        await rest(engine)


async def test_rows_travel_to_their_experts_and_outlive_a_worker(model: Path) -> None:
    """In chunks, with prompts that lie in the prefix cache, and one part idle at first."""
    expected = await alone(model, PROMPTS, PARAMS)
    async with shared(model, moe_a2a_backend="deepep") as engine:
        assert await tokens_of(engine, PROMPTS[5], PARAMS) == expected[5]
        readers = [asyncio.create_task(tokens_of(engine, prompt, PARAMS)) for prompt in PROMPTS]
        await all_decode(engine)
        kill(engine, 1)
        async with asyncio.timeout(PATIENCE):
            assert await asyncio.gather(*readers) == expected
        assert [worker["restarts"] for worker in engine.describe()["workers"]] == [1, 1]
        assert [worker.rank.ep for worker in engine.worker_ids.values()] == [0, 1]
        await rest(engine)


async def test_a_scheduler_that_dies_does_not_stop_the_other(model: Path) -> None:
    expected = await alone(model, PROMPTS, PARAMS)
    async with shared(model) as engine:
        readers = [asyncio.create_task(tokens_of(engine, prompt, PARAMS)) for prompt in PROMPTS]
        await all_decode(engine)
        assert engine._system is not None
        engine._system.crash_actor(replicas(engine)[1].scheduler, ChildCrash("a test"))
        async with asyncio.timeout(PATIENCE):
            assert await asyncio.gather(*readers) == expected
        assert [worker["restarts"] for worker in engine.describe()["workers"]] == [0, 0]
        await rest(engine)


async def test_parts_with_adapters_generate_what_merged_models_do(model: Path, tmp_path: Path) -> None:
    """Each part has requests of both adapters and of none, and more adapters than places."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    modules = adapted_modules(model, (".experts.",))
    files: dict[str | None, Path] = {
        name: save_adapter(tmp_path / name, modules, seed) for seed, name in enumerate(("first", "other"))
    }
    expected = []
    for name in (None, *files):
        expected += await alone(merged(model, tmp_path / f"merged {name}", files.get(name)), PROMPTS[:4], params)
    assert len({str(answer) for answer in expected}) == len(expected)
    paths = [f"{name}={path}" for name, path in files.items()]
    async with shared(model, lora_paths=paths, max_loras_per_batch=1, max_running_requests=12) as engine:
        async with asyncio.timeout(PATIENCE):
            found = await asyncio.gather(
                *(tokens_of(engine, prompt, params, name) for name in (None, *files) for prompt in PROMPTS[:4])
            )
        assert found == expected
        await rest(engine)


@pytest.mark.long
@pytest.mark.parametrize(("algorithm", "tp"), [("NGRAM", 2), ("STANDALONE", 4)])
async def test_parts_draft_for_their_own_requests(model: Path, algorithm: str, tp: int) -> None:
    """The draft has experts of its own, which each part has whole. One of them dies meanwhile."""
    options: dict[str, Any] = {"speculative_algorithm": algorithm, "speculative_num_draft_tokens": 5}
    if algorithm == "STANDALONE":
        options |= {"speculative_draft_model_path": str(model), "speculative_num_steps": 4}
    expected = await alone(model, PROMPTS, LONG)
    async with shared(model, tp, **options) as engine:
        readers = [asyncio.create_task(tokens_of(engine, prompt, LONG)) for prompt in PROMPTS]
        await all_decode(engine)
        kill(engine, 1)
        async with asyncio.timeout(PATIENCE):
            assert await asyncio.gather(*readers) == expected
        accepted: Any = engine.board.all[0]._counted.readings()["troupe_speculative_accepted_tokens_total"]
        assert sum(accepted.values()) > 0
        await rest(engine)


async def test_only_the_harmful_request_of_a_replica_fails(model: Path) -> None:
    expected = await alone(model, PROMPTS[:5], PARAMS)
    with FaultPlan(Fault("decode", "kill", mark=7)) as plan:
        async with shared(model, faults=plan) as engine:
            readers = [asyncio.create_task(tokens_of(engine, prompt, PARAMS)) for prompt in [*PROMPTS[:5], [7] * 20]]
            async with asyncio.timeout(PATIENCE):
                *answers, harmful = await asyncio.gather(*readers, return_exceptions=True)
            assert isinstance(harmful, RequestFailed)
            assert answers == expected
            await rest(engine)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tp": 2}, "needs data_parallel_size"),
        ({"tp": 3, "dp": 2}, "divides tensor_parallel_size, 3"),
        ({"tp": 2, "dp": 2, "pp": 2}, "contradicts pipeline_parallel_size"),
    ],
    ids=str,
)
def test_attention_that_cannot_be_divided_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        Engine(model="model", enable_dp_attention=True, **options)
