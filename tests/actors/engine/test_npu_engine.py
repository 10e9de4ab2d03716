"""The whole engine on simulated NPUs: the included model, its worker in a child process, against the CPU platform.

In float32 the tokens must be the CPU's, sampled ones too. In bfloat16, where attention is the fused operator and sums
are taken in another order, every greedy token must be the CPU's argmax in float32, or within ``CLOSE`` of it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from actors.boards.stream_buffer import merge
from actors.protocol.requests import EngineFailed, SamplingParams
from tests.kits.npu_engine import CLOSE, GREEDY, PROMPTS, SAMPLED, all_tokens, serving, tokens_of
from tests.kits.real_server import running
from tests.kits.waiting import PATIENCE

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("torch_npu") is None, reason="torch_npu is not installed: pip install -e '.[npu-sim]'"
    ),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="the NPU simulator needs gcc and nm (binutils)"),
]


@pytest.fixture(scope="module")
def on_cpu() -> dict[str, list[list[int]]]:
    """What the CPU platform says in float32."""

    async def ask() -> dict[str, list[list[int]]]:
        async with serving(device="cpu", dtype="float32", cpu_threads=1) as engine:
            return {"greedy": await all_tokens(engine), "sampled": await all_tokens(engine, SAMPLED)}

    return asyncio.run(ask())


@pytest.mark.parametrize("generation", ["A2", "A3"])
async def test_float32_generates_what_the_cpu_generates(generation: str, on_cpu: dict[str, list[list[int]]]) -> None:
    """Greedy and sampled, prompts in chunks beside decodes."""
    async with serving(npu_simulator=generation, dtype="float32") as engine:
        described = engine.describe()
        assert described["workers"][0]["device"] == f"npu (simulated {generation})"
        assert described["model_info"]["page_size"] == 128
        assert await all_tokens(engine) == on_cpu["greedy"]
        assert await all_tokens(engine, SAMPLED) == on_cpu["sampled"]


async def near_the_cpu(prompts: list[list[int]], outputs: list[list[int]]) -> None:
    """Every token of the outputs is the CPU's argmax in float32, or nearly."""
    score = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)
    async with serving(device="cpu", dtype="float32", cpu_threads=1) as engine:
        for prompt, tokens in zip(prompts, outputs, strict=True):
            result = merge([delta async for delta in engine.generate([*prompt, *tokens], score)])
            assert result.prompt_logprobs is not None
            for scored in result.prompt_logprobs[len(prompt) :]:
                assert scored.logprob is not None
                assert scored.logprob > (scored.top[0].logprob or 0) - CLOSE


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
async def test_bfloat16_on_a5_is_near_what_the_cpu_says(graphs: bool) -> None:
    async with serving(npu_simulator="A5", disable_cuda_graph=not graphs) as engine:
        assert bool(engine.describe()["model_info"]["graph_rows"]) == graphs
        found = await all_tokens(engine)
        prompts = [await engine.tokenize(prompt) for prompt in PROMPTS]
    await near_the_cpu(prompts, found)


async def test_the_prefix_cache_is_used_and_changes_nothing(on_cpu: dict[str, list[list[int]]]) -> None:
    async with serving(npu_simulator="A2", dtype="float32") as engine:
        for _ in range(2):
            result = merge([delta async for delta in engine.generate(PROMPTS[3], GREEDY)])
            assert list(result.token_ids) == on_cpu["greedy"][3]
        assert result.usage.cached_tokens >= 128


async def test_preempted_requests_generate_the_same(on_cpu: dict[str, list[list[int]]]) -> None:
    """Eight pages for what needs more: someone must give way and come back."""
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    short = [PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[5], "Tell me a story", "Who are you?"]
    options: dict[str, Any] = {"dtype": "float32", "schedule_conservativeness": 0.01, "disable_radix_cache": True}
    async with serving(device="cpu", cpu_threads=1, **options) as engine:
        expected = await asyncio.gather(*(tokens_of(engine, prompt, params) for prompt in short))
    async with serving(npu_simulator="A2", **(options | {"max_total_tokens": 8 * 128})) as engine:
        found = await asyncio.gather(*(tokens_of(engine, prompt, params) for prompt in short))
        assert engine.describe()["scheduler"]["preemptions"] > 0
    assert found == expected


async def test_sampling_backends_agree() -> None:
    found = []
    for backend in ("pytorch", "ascend"):
        async with serving(npu_simulator="A2", dtype="float32", sampling_backend=backend) as engine:
            found.append(await all_tokens(engine, SAMPLED))
    assert found[0] == found[1]


async def test_the_cpu_still_serves_beside_torch_npu() -> None:
    """Where torch_npu is installed and CANN is not, a plain import of torch fails."""
    async with serving(device="cpu", cpu_threads=1) as engine:
        assert engine.describe()["workers"][0]["device"] == "cpu"
        assert len(await tokens_of(engine, PROMPTS[0])) == 40


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"page_size": 16}, "--page-size 128"),
        ({"dtype": "float32", "attention_backend": "ascend"}, "--dtype bfloat16"),
        ({"npu_simulator": "A5", "sampling_backend": "ascend"}, "use pytorch"),
        ({"base_gpu_id": 5}, "ASCEND_RT_VISIBLE_DEVICES"),
        ({"max_total_tokens": 1 << 24}, "--max-total-tokens"),
    ],
)
async def test_what_cannot_be_is_reported_at_the_start(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineFailed, match=message):
        async with serving(**({"npu_simulator": "A2"} | keywords)):
            pass


async def test_a_failing_device_is_named_and_its_worker_starts_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of a kernel in the second request: it goes on with the next worker. Of a prompt whose answer has no near
    tie in bf16, which the resumed prefill could round the other way."""
    monkeypatch.setenv("TROUPE_NPU_FAULT", "aicore@400@fused_infer")
    async with serving(npu_simulator="A2:2", base_gpu_id=1, disable_cuda_graph=True) as engine:
        first = await tokens_of(engine, PROMPTS[1])
        assert await tokens_of(engine, PROMPTS[1]) == first
        assert engine.describe()["workers"][0]["restarts"] >= 1
    assert "NPU 1 (Ascend910B3) failed with error 507015" in caplog.text
    assert "The aicore execution is abnormal" in caplog.text
    assert "ASCEND_LAUNCH_BLOCKING=1" in caplog.text


async def test_a_hung_kernel_is_a_death_and_the_request_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first worker hangs in its 400th attention; the operator's timeout turns that into an error of the device."""
    monkeypatch.setattr("actors.engine.configuration.OP_TIMEOUT_SECONDS", 1.0)
    async with serving(npu_simulator="A2", disable_cuda_graph=True) as engine:
        expected = await tokens_of(engine, PROMPTS[0])
    monkeypatch.setenv("TROUPE_NPU_FAULT", "hang@300@fused_infer")
    async with serving(npu_simulator="A2", disable_cuda_graph=True) as engine:
        assert await tokens_of(engine, PROMPTS[0]) == expected
        assert await tokens_of(engine, PROMPTS[0]) == expected
        assert engine.describe()["workers"][0]["restarts"] >= 1
    assert "507014" in caplog.text
    assert "did not end in its time" in caplog.text


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("generation", ["A2", "A3"])
async def test_over_http(generation: str, graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server with small chunks and few pages, in bfloat16: greedy, sampled, a cached prefix, preempted requests."""
    simulator = f"{generation}:2:1GiB"
    arguments = ["--max-running-requests", "6", "--chunked-prefill-size", "64", "--base-gpu-id", "1"]
    arguments += ["--max-total-tokens", str(8 * 128), "--schedule-conservativeness", "0.01"]
    arguments += [] if graphs else ["--disable-cuda-graph"]
    if graphs:
        monkeypatch.setenv("TROUPE_NPU_SIMULATOR", simulator)
    else:
        arguments += ["--npu-simulator", simulator]
    with running(tmp_path / "log", *arguments) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:

            async def ask(prompt: str, **sampling: Any) -> dict[str, Any]:
                params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True} | sampling
                body = {"text": prompt, "sampling_params": params, "return_prompt_token_ids": True}
                answer = await client.post("/generate", json=body)
                assert answer.status_code == 200, answer.text
                reported: dict[str, Any] = answer.json()
                return reported

            information = (await client.get("/server_info")).json()
            assert information["workers"][0]["device"] == f"npu (simulated {simulator})"
            assert bool(information["model_info"]["graph_rows"]) == graphs
            crowd = [PROMPTS[0], PROMPTS[2], *(f"{name} " + PROMPTS[3][:480] for name in ("a", "b", "c", "d"))]
            first = await ask(PROMPTS[3])
            again = await ask(PROMPTS[3])
            assert again["meta_info"]["cached_tokens"] >= 128 > first["meta_info"]["cached_tokens"]
            found = [first, again, *await asyncio.gather(*(ask(prompt, max_new_tokens=40) for prompt in crowd))]
            assert "Paris" in found[2]["text"]
            metrics = (await client.get("/metrics")).text
            (preempted,) = re.findall(r"^troupe_preemptions_total\S* (\S+)$", metrics, re.M)
            assert float(preempted) > 0
            drawn = {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "max_new_tokens": 12}
            texts = [(await ask(PROMPTS[1], sampling_seed=seed, **drawn))["output_ids"] for seed in (11, 11, 12)]
            assert texts[0] == texts[1] != texts[2]
    await near_the_cpu([answer["prompt_token_ids"] for answer in found], [answer["output_ids"] for answer in found])
