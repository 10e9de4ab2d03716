"""A model on two simulated NPUs, through the whole engine: eager and in graphs, and what a hung collective does."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from actors.boards.stream_buffer import merge
from actors.faults import Fault, FaultPlan
from actors.protocol.requests import EngineFailed, SamplingParams
from tests.kits.nodes import cluster
from tests.kits.npu_engine import CLOSE, GREEDY, PROMPTS, SAMPLED, all_tokens, serving, tokens_of
from tests.kits.replicas import replicas

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("torch_npu") is None, reason="torch_npu is not installed: pip install -e '.[npu-sim]'"
    ),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="the NPU simulator needs gcc and nm (binutils)"),
]

CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_threads": 1}


async def test_two_npus_generate_what_the_cpu_generates() -> None:
    async with serving(**CPU) as engine:
        expected = [await all_tokens(engine), await all_tokens(engine, SAMPLED)]
    async with serving(npu_simulator="A2", dtype="float32", tp=2) as engine:
        assert [worker["name"] for worker in engine.describe()["workers"]] == ["worker-0", "worker-1"]
        assert [await all_tokens(engine), await all_tokens(engine, SAMPLED)] == expected


async def test_npus_of_two_nodes_generate_what_the_cpu_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(**CPU) as engine:
        expected = await all_tokens(engine)
    with cluster(tmp_path, monkeypatch) as nodes:
        other = nodes.start("--npu-simulator", "A2", "--tp", "2")
        async with serving(npu_simulator="A2", dtype="float32", tp=2, **nodes.options) as engine:
            assert [worker["node"] for worker in engine.describe()["workers"]] == [0, 1]
            assert await all_tokens(engine) == expected
        assert other.wait() == 0


async def test_graphs_hold_the_collectives_and_a_dead_worker_loses_nothing() -> None:
    """bfloat16: near what the CPU says in float32, and the same again when rank 1 dies in the middle."""
    async with serving(npu_simulator="A3", tp=2, cuda_graph_bs=(1, 2, 8)) as engine:
        assert engine.describe()["model_info"]["graph_rows"] == (1, 2, 8)
        found = await all_tokens(engine)
        alone = await tokens_of(engine, PROMPTS[0])
        before = [worker["pid"] for worker in engine.describe()["workers"]]
        stream = engine.generate(PROMPTS[0], GREEDY)
        first = await anext(stream)
        os.kill(before[1], signal.SIGKILL)
        assert [*first.token_ids, *merge([delta async for delta in stream]).token_ids] == alone
        assert not set(before) & {worker["pid"] for worker in engine.describe()["workers"]}
        prompts = [await engine.tokenize(prompt) for prompt in PROMPTS]
    score = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)
    async with serving(**CPU) as engine:
        for prompt, tokens in zip(prompts, found, strict=True):
            result = merge([delta async for delta in engine.generate([*prompt, *tokens], score)])
            assert result.prompt_logprobs is not None
            for scored in result.prompt_logprobs[len(prompt) :]:
                assert scored.logprob is not None
                assert scored.logprob > (scored.top[0].logprob or 0) - CLOSE


async def test_a_hung_collective_is_a_death_and_the_request_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The 700th collective of an incarnation hangs, for both ranks: it times out with an error, and all restart."""
    short = [PROMPTS[0], PROMPTS[1], PROMPTS[5]]
    async with serving(**CPU) as engine:
        expected = [await tokens_of(engine, prompt) for prompt in short]
    monkeypatch.setattr("actors.engine.configuration.OP_TIMEOUT_SECONDS", 3.0)
    monkeypatch.setenv("TROUPE_NPU_FAULT", "hang@700@hccl")
    async with serving(npu_simulator="A2", dtype="float32", tp=2) as engine:
        assert list(await asyncio.gather(*(tokens_of(engine, prompt) for prompt in short))) == expected
        assert [worker["restarts"] for worker in engine.describe()["workers"]] == [1, 1]
    assert "failed with error 507048" in caplog.text
    assert "Notify wait" in caplog.text
    assert "HCCL_EXEC_TIMEOUT" in caplog.text


async def test_a_replica_takes_over_from_one_that_loses_its_npu() -> None:
    async with serving(npu_simulator="A2", dtype="float32", tp=1) as engine:
        expected = await all_tokens(engine)
    with FaultPlan(Fault("decode", "device", nth=3, operator="lost@3")) as plan:
        options: dict[str, Any] = {"dtype": "float32", "dp": 2, "cuda_graph_bs": (1, 2, 8), "faults": plan}
        async with serving(npu_simulator="A2", **options) as engine:
            assert await all_tokens(engine) == expected
            restarts = [worker["restarts"] for worker in engine.describe()["workers"]]
            assert sorted(restarts) == [0, 1]
            survivor = replicas(engine)[restarts.index(0)].board.cache()
            assert survivor is not None
            assert survivor.queried_tokens > 0
            assert plan.pending() == 0


async def test_more_ranks_than_devices_are_refused() -> None:
    with pytest.raises(EngineFailed, match="not one of the 1 simulated devices"):
        async with serving(npu_simulator="A2:1", tp=2):
            pass
