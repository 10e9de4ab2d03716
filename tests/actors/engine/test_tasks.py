"""Tasks other than generating: embed, score and classify, at the engine."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.engine.engine import Engine
from actors.protocol.requests import InvalidRequest, SamplingParams
from kernels.contract.tasks import Embed, Score, Vector
from tests.kits.engines import rest, small_engine

TEXTS = ["The quick brown fox", "jumps", "over the lazy dog. " * 12]


def reference(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def last_hidden_state(model: Any, ids: list[int]) -> Any:
    return model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1]


@torch.inference_mode()
def log_probability(model: Any, ids: list[int], start: int) -> float:
    """The log-probability of the tokens ``start ..``, each after all before it."""
    tokens = torch.tensor([ids])
    logprobs = model(tokens).logits.log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])
    return float(logprobs[start - 1 :].sum())


async def test_an_embedding_is_that_of_transformers(tiny_model: Path) -> None:
    model = reference(tiny_model)
    async with small_engine(tiny_model, chunked_prefill_size=32) as engine:
        for text in [*TEXTS, TEXTS[2]]:  # at last its prefix is cached
            ids = await engine.tokenize(text)
            hidden = last_hidden_state(model, ids)
            plain = await engine.embed(text, normalize=False)
            assert np.allclose(plain, hidden, rtol=1e-3, atol=1e-4)
            unit = await engine.embed(ids)
            assert np.allclose(unit, torch.nn.functional.normalize(hidden, dim=0), rtol=1e-3, atol=1e-5)
            assert math.isclose(sum(value * value for value in unit), 1.0, rel_tol=1e-5)
        stream = engine.generate(TEXTS[0], SamplingParams(max_tokens=1), task=Embed())
        deltas = [delta async for delta in stream]
        assert [(delta.text, delta.token_ids, delta.finish_reason) for delta in deltas] == [("", (), "stop")]
        assert isinstance(deltas[0].result, Vector)
        assert stream.timeline.operation == "embeddings"
        await rest(engine)


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"speculative_algorithm": "NGRAM"}, {"disable_overlap_schedule": True}], ids=str
)
async def test_embeddings_run_beside_chats(tiny_model: Path, options: dict[str, Any]) -> None:
    """Also of prompts of which one token is left to run, as decodes have."""
    model = reference(tiny_model)
    prompts = [[7], list(range(10, 27)), list(range(10, 27)), list(range(10, 75))]
    expected = [torch.nn.functional.normalize(last_hidden_state(model, ids), dim=0) for ids in prompts]
    async with small_engine(tiny_model, page_size=16, **options) as engine:
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        alone = [delta.token_ids async for delta in engine.generate(prompts[1], params)]
        chat = asyncio.create_task(tokens_of(engine, prompts[1], params))
        vectors = await asyncio.gather(*(engine.embed(ids) for ids in prompts))
        assert [float(want @ torch.tensor(got)) for want, got in zip(expected, vectors, strict=True)] == [
            pytest.approx(1.0, abs=5e-3)
        ] * len(prompts)
        assert await chat == [token for ids in alone for token in ids]
        await rest(engine)


async def tokens_of(engine: Engine, prompt: list[int], params: SamplingParams) -> list[int]:
    return [token async for delta in engine.generate(prompt, params) for token in delta.token_ids]


async def test_a_score_is_the_sum_of_log_probabilities(tiny_model: Path) -> None:
    model = reference(tiny_model)
    async with small_engine(tiny_model) as engine:
        prompt = await engine.tokenize(TEXTS[0])
        for continuation in ([7], [11, 12, 13, 14]):
            expected = log_probability(model, [*prompt, *continuation], len(prompt))
            assert await engine.score(TEXTS[0], continuation) == pytest.approx(expected, rel=1e-3)
        assert await engine.score(prompt, " over the lazy dog") < 0.0
        with pytest.raises(InvalidRequest, match="start 9 leaves no token"):
            await engine.generate([5, 6, 7], task=Score(start=9)).ready()
        with pytest.raises(InvalidRequest, match="continuation"):
            await engine.score(prompt, [])
        await rest(engine)


async def test_a_score_of_a_truncated_prompt_is_refused(tiny_model: Path) -> None:
    """Its sum would be that of fewer tokens."""
    async with small_engine(tiny_model, context_length=64, allow_auto_truncate=True) as engine:
        with pytest.raises(InvalidRequest, match="has 80 tokens; this model's maximum context length is 64"):
            await engine.score([5] * 60, [6] * 20)
        assert len(await engine.embed([5] * 80)) > 0
        await rest(engine)


async def test_a_task_that_a_model_cannot_do_is_refused(tiny_model: Path) -> None:
    async with small_engine(tiny_model) as engine:
        with pytest.raises(InvalidRequest, match="cannot classify: it has no classification head") as caught:
            await engine.classify("The quick brown fox")
        assert (caught.value.param, caught.value.code) == ("task", "unsupported_task")
        assert "score" in str(caught.value)
        assert engine.describe()["requests"]["live"] == 0
        with pytest.raises(ValueError, match="start"):
            Score(start=0)
