"""Hidden states and experts that requests return, at the engine and over HTTP."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.engine.engine import Engine
from actors.protocol.requests import LIMITS, InvalidRequest, SamplingParams
from app.application import create_app
from kernels.models.layers.routes import RouteRecord
from tests.kits.engines import rest, small_engine
from tests.kits.tiny_model import make_tiny_model

PROMPTS = [[7], list(range(10, 27)), list(range(30, 130))]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, hidden_states=True)

States = npt.NDArray[np.float32]


@torch.inference_mode()
def expected(path: Path, ids: list[int]) -> States:
    """The last entry of transformers' hidden states is behind the final norm."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    states: States = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0].numpy()
    return states


async def states_of(engine: Engine, prompt: list[int], params: SamplingParams = PARAMS) -> tuple[list[int], States]:
    tokens: list[int] = []
    packed = b""
    async for delta in engine.generate(prompt, params):
        assert delta.logprobs is None
        tokens += delta.token_ids
        packed += delta.hidden_states
    return tokens, np.frombuffer(packed, dtype=np.float32).reshape(len(prompt) + len(tokens) - 1, -1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_deterministic_inference": True},
        {"disable_cuda_graph": True},
        {"speculative_algorithm": "NGRAM"},
        {"tp_size": 2},
        {"pp_size": 2},
    ],
    ids=str,
)
async def test_hidden_states_are_those_of_transformers(tiny_model: Path, options: dict[str, Any]) -> None:
    async with small_engine(tiny_model, enable_return_hidden_states=True, chunked_prefill_size=32, **options) as engine:
        plain = msgspec.structs.replace(PARAMS, hidden_states=False)
        beside = asyncio.create_task(states_of_plain(engine, plain))
        for _ in range(2):  # the second time the prompts are cached
            for prompt in PROMPTS:
                tokens, states = await states_of(engine, prompt)
                assert len(tokens) == 6
                assert np.allclose(states, expected(tiny_model, [*prompt, *tokens[:-1]]), rtol=1e-3, atol=1e-4)
        await beside
        await rest(engine)


async def states_of_plain(engine: Engine, params: SamplingParams) -> None:
    async for delta in engine.generate(PROMPTS[1], params):
        assert not delta.hidden_states


async def test_hidden_states_go_on_behind_a_dead_worker(tiny_model: Path) -> None:
    params = msgspec.structs.replace(PARAMS, max_tokens=60)
    async with small_engine(tiny_model, enable_return_hidden_states=True) as engine:
        whole = await states_of(engine, PROMPTS[1], params)
        tokens: list[int] = []
        packed = b""
        async for delta in engine.generate(PROMPTS[1], params):
            if not tokens:
                os.kill(int(engine.describe()["workers"][0]["pid"] or 0), signal.SIGKILL)
            tokens += delta.token_ids
            packed += delta.hidden_states
        assert tokens == whole[0]
        states = np.frombuffer(packed, dtype=np.float32).reshape(whole[1].shape)
        assert np.allclose(states, whole[1], rtol=1e-3, atol=1e-4)
        await rest(engine)


async def test_hidden_states_need_the_option_and_have_a_limit(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with small_engine(tiny_model) as engine:
        with pytest.raises(InvalidRequest, match="--enable-return-hidden-states") as caught:
            await engine.generate([5, 6], PARAMS).ready()
        assert caught.value.param == "hidden_states"
    async with small_engine(tiny_model, enable_return_hidden_states=True) as engine:
        info = engine.model_info
        assert info is not None
        size = info.hidden_size
        limits = msgspec.structs.replace(LIMITS, state_numbers=20 * size)
        monkeypatch.setattr("actors.requests.request_rules.LIMITS", limits)
        with pytest.raises(InvalidRequest, match=rf"23 tokens|are {23 * size} numbers; at most {20 * size}") as caught:
            await engine.generate(list(range(17)), PARAMS).ready()
        assert caught.value.code == "too_many_hidden_states"
        open_ended = msgspec.structs.replace(PARAMS, max_tokens=None)
        tokens, _ = await states_of(engine, list(range(17)), open_ended)
        assert len(tokens) == 3
        await rest(engine)


async def test_hidden_states_over_http_have_sglangs_form(tiny_model: Path) -> None:
    engine = small_engine(tiny_model, enable_return_hidden_states=True, skip_server_warmup=True)
    client = create_app(engine.arguments, engine).test_client()
    async with engine:
        prompt = PROMPTS[1]
        sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_hidden_states": True}
        found = await (await client.post("/generate", json=body)).get_json()
        whole = expected(tiny_model, [*prompt, *found["output_ids"][:-1]])
        first, *others = found["meta_info"]["hidden_states"]
        assert np.allclose(first, whole[: len(prompt)], rtol=1e-3, atol=1e-4)
        assert np.allclose(others, whole[len(prompt) :], rtol=1e-3, atol=1e-4)

        data = await (await client.post("/generate", json={**body, "stream": True})).get_data()
        events = [msgspec.json.decode(line[6:]) for line in data.split(b"\n\n") if line.startswith(b"data: {")]
        assert ["hidden_states" in event["meta_info"] for event in events] == [False] * (len(events) - 1) + [True]
        assert events[-1]["meta_info"]["hidden_states"] == found["meta_info"]["hidden_states"]

        body = {"prompt": prompt, "temperature": 0, "max_tokens": 4, "ignore_eos": True, "return_hidden_states": True}
        answer = await (await client.post("/v1/completions", json=body)).get_json()
        assert np.allclose(answer["choices"][0]["hidden_states"], whole[-1], rtol=1e-3, atol=1e-4)
        answer = await (await client.post("/v1/completions", json={**body, "max_tokens": 1})).get_json()
        assert answer["choices"][0]["hidden_states"] == []
        refused = await client.post("/v1/completions", json={**body, "stream": True})
        assert refused.status_code == 400
        assert (await refused.get_json())["error"]["param"] == "return_hidden_states"

        del body["prompt"]
        body["messages"] = [{"role": "user", "content": "hi"}]
        answer = await (await client.post("/v1/chat/completions", json=body)).get_json()
        assert len(answer["choices"][0]["hidden_states"]) == whole.shape[1]
        body["return_hidden_states"] = False
        answer = await (await client.post("/v1/chat/completions", json=body)).get_json()
        assert "hidden_states" not in answer["choices"][0]
        await rest(engine)


@pytest.fixture(scope="module")
def sparse_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("sparse"),
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


@torch.inference_mode()
def expected_experts(path: Path, ids: list[int]) -> npt.NDArray[np.int64]:
    """[tokens, layers, chosen], each token's in ascending order."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    taken = torch.stack([layer.view(len(ids), -1).topk(2, -1).indices for layer in logits], 1)
    found: npt.NDArray[np.int64] = taken.sort(-1).values.numpy()
    return found


@pytest.mark.parametrize("options", [{}, {"speculative_algorithm": "NGRAM"}, {"tp_size": 2}], ids=str)
async def test_experts_are_those_of_transformers(sparse_model: Path, options: dict[str, Any]) -> None:
    params = msgspec.structs.replace(PARAMS, hidden_states=False, routed_experts=True)
    plain = msgspec.structs.replace(params, routed_experts=False)
    async with small_engine(
        sparse_model, enable_return_routed_experts=True, chunked_prefill_size=32, **options
    ) as engine:
        for prompt in (*PROMPTS, PROMPTS[2]):
            beside = asyncio.create_task(states_of_plain(engine, plain))
            tokens: list[int] = []
            packed = b""
            async for delta in engine.generate(prompt, params):
                tokens += delta.token_ids
                packed += delta.routed_experts
            whole = [*prompt, *tokens[:-1]]
            found = np.frombuffer(packed, dtype=np.int32).reshape(len(whole), -1, 2)
            assert (np.sort(found, -1) == expected_experts(sparse_model, whole)).all()
            await beside
        await rest(engine)


async def test_experts_over_http_have_sglangs_form(sparse_model: Path, tiny_model: Path) -> None:
    engine = small_engine(sparse_model, enable_return_routed_experts=True, skip_server_warmup=True)
    client = create_app(engine.arguments, engine).test_client()
    async with engine:
        prompt, sampling = PROMPTS[1], {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_routed_experts": True}
        found = await (await client.post("/generate", json=body)).get_json()
        whole = expected_experts(sparse_model, [*prompt, *found["output_ids"][:-1]])
        for start in (0, 5, len(prompt)):
            answer = await (await client.post("/generate", json={**body, "routed_experts_start_len": start})).get_json()
            packed = base64.b64decode(answer["meta_info"]["routed_experts"])
            taken = np.frombuffer(packed, dtype=np.int32).reshape(len(whole) - start, -1, 2)
            assert (np.sort(taken, -1) == whole[start:]).all()
        refused = await client.post("/generate", json={**body, "routed_experts_start_len": len(prompt) + 1})
        assert (refused.status_code, (await refused.get_json())["error"]["param"]) == (400, "routed_experts_start_len")
        await rest(engine)
    async with small_engine(tiny_model, enable_return_routed_experts=True) as engine:
        with pytest.raises(InvalidRequest, match="no layers of experts"):
            await engine.generate([5, 6], SamplingParams(routed_experts=True)).ready()
    async with small_engine(sparse_model) as engine:
        with pytest.raises(InvalidRequest, match="--enable-return-routed-experts"):
            await engine.generate([5, 6], SamplingParams(routed_experts=True)).ready()


def test_experts_of_dense_layers_are_zeros() -> None:
    record = RouteRecord()
    assert not record.is_open
    record.open()
    for layer in (1, 2):
        record.add(torch.full((3, 2), layer))
    found = record.close(4, (1, 3))
    assert found.dtype == torch.int32
    assert found[0, :, 0].tolist() == [0, 1, 0, 2]
    assert not record.is_open
