"""Context parallelism: workers divide the prompts of a model with sparse attention by tokens."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

from actors.engine.engine import Engine
from actors.faults import Fault, FaultPlan
from actors.options import ArgumentError
from actors.protocol.requests import SamplingParams
from tests.kits.driver import COMMON, INDEXED
from tests.kits.engines import rest, small_engine
from tests.kits.nodes import cluster
from tests.kits.replicas import all_decode, alone, kill, outlives, tokens_of
from tests.kits.waiting import PATIENCE, until

PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PROMPTS: list[Any] = ["The lazy dog", list(range(30, 180)), [7, 8, 9], [*range(30, 130), *range(200, 290)]]
MODEL: dict[str, Any] = {
    **COMMON,
    **INDEXED,
    "architectures": ["GlmMoeDsaForCausalLM"],
    "n_group": 1,
    "topk_group": 1,
    "indexer_types": ["full", "shared", "full"],
    "vocab_size": 384,
    "max_position_embeddings": 512,
}


async def prompt_logprobs(engine: Engine) -> list[float | None]:
    """Of the prompt's tokens but the first."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    found = [delta.prompt_logprobs async for delta in engine.generate(PROMPTS[1], params)]
    return [token.logprob for tokens in found if tokens for token in tokens][1:]


@pytest.mark.long
async def test_context_parallel_workers_give_the_tokens_of_one(tiny_model: Path) -> None:
    """In chunks beside decodes, behind prefixes in the cache, and when a worker is killed."""
    options: dict[str, Any] = {"device": "cpu", "load_format": "dummy", "json_model_override_args": MODEL}
    expected = await alone(tiny_model, PROMPTS, PARAMS, **options)
    async with small_engine(tiny_model, **options) as engine:
        scored = await prompt_logprobs(engine)
    assert len({str(answer) for answer in expected}) == len(expected)
    async with small_engine(tiny_model, tp=2, enable_nsa_prefill_context_parallel=True, **options) as engine:
        for _ in range(2):
            async with asyncio.timeout(PATIENCE):
                assert await asyncio.gather(*(tokens_of(engine, prompt, PARAMS) for prompt in PROMPTS)) == expected
        usage = engine.board.cache()
        assert usage is not None
        assert usage.hit_tokens > 0
        found = await prompt_logprobs(engine)
        assert len(found) == len(scored) == len(PROMPTS[1]) - 1
        assert found == pytest.approx(scored, abs=1e-4)
        readers = [asyncio.create_task(tokens_of(engine, prompt, PARAMS)) for prompt in PROMPTS]
        await all_decode(engine, len(PROMPTS))
        kill(engine, 1)
        async with asyncio.timeout(PATIENCE):
            assert await asyncio.gather(*readers) == expected
        assert [worker["restarts"] for worker in engine.describe()["workers"]] == [1, 1]
        await rest(engine)


NPU = pytest.mark.skipif(
    PathFinder.find_spec("torch_npu") is None or shutil.which("gcc") is None, reason="the NPU simulator is missing"
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("device", "faults"),
    [
        ("cpu", [Fault("decode", "link", nth=3), (0, signal.SIGSTOP)]),
        pytest.param("npu", [Fault("decode", "device", nth=3, operator="lost@3")], marks=NPU),
    ],
    ids=["cpu", "npu"],
)
async def test_requests_outlive_faults_of_context_parallel_workers(
    tiny_model: Path, device: str, faults: list[Fault | tuple[int, int]]
) -> None:
    options: dict[str, Any] = {"load_format": "dummy", "json_model_override_args": MODEL}
    params, expected = PARAMS, None
    if device == "npu":
        options |= {"npu_simulator": "A2", "disable_cuda_graph": True, "cpu_threads": None, "page_size": 128}
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    else:
        options["device"] = "cpu"
        expected = await alone(tiny_model, PROMPTS, params, **options)
    options |= {"tp": 2, "enable_nsa_prefill_context_parallel": True}
    options["watchdog_timeout"] = 5.0 if device == "cpu" else 30.0
    requests = [(each, None) for each in PROMPTS]
    with FaultPlan() as plan:
        async with small_engine(tiny_model, faults=plan, **options) as engine:
            if expected is None:
                expected = [await tokens_of(engine, prompt, params) for prompt in PROMPTS]
            for fault in faults:
                await outlives(engine, plan, requests, params, expected, fault)


@pytest.mark.long
async def test_context_parallel_requests_outlive_the_loss_of_a_node(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"device": "cpu", "load_format": "dummy", "json_model_override_args": MODEL}
    expected = await alone(tiny_model, PROMPTS, PARAMS, **options)
    options |= {"tp": 2, "enable_nsa_prefill_context_parallel": True}
    with cluster(tmp_path, monkeypatch) as nodes:
        command = ["--model-path", str(tiny_model), "--device=cpu", "--tp=2", "--load-format=dummy"]
        command += [f"--json-model-override-args={json.dumps(MODEL)}", "--enable-nsa-prefill-context-parallel"]
        other = nodes.start(*command)
        async with small_engine(tiny_model, **options, **nodes.options) as engine:
            readers = [asyncio.create_task(tokens_of(engine, prompt, PARAMS)) for prompt in PROMPTS]
            await all_decode(engine, len(PROMPTS))
            other.signal(signal.SIGKILL)
            await until(lambda: "Node 1 is not connected" in engine.health().reason, "it is not missed")
            other = nodes.start(*command)
            async with asyncio.timeout(PATIENCE):
                assert await asyncio.gather(*readers) == expected
            assert [worker["restarts"] for worker in engine.describe()["workers"]] == [1, 1]
            await rest(engine)
        assert other.wait() == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "needs tensor_parallel_size"),
        ({"tp": 2, "dp": 2, "enable_dp_attention": True}, "contradicts enable_dp_attention"),
        ({"tp": 2, "pp": 2}, "contradicts pipeline_parallel_size"),
        (
            {"tp": 2, "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "d"},
            "contradicts speculative_algorithm EAGLE3 and DFLASH",
        ),
    ],
    ids=str,
)
def test_options_that_exclude_context_parallelism_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        Engine(model="model", enable_nsa_prefill_context_parallel=True, **options)


def test_context_parallelism_takes_adapters() -> None:
    adapters: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["all"]}
    assert Engine(model="model", tp=2, enable_nsa_prefill_context_parallel=True, **adapters).arguments.has_adapters
