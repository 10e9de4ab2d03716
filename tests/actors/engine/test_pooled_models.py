"""Engines of models that generate no text: they embed or classify, and refuse the rest by name."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.engine.engine import Engine
from actors.protocol.requests import InvalidRequest, SamplingParams
from kernels.contract.tasks import Classify, NextToken, Vector
from tests.kits.engines import halt_in_a_step, rest, small_engine
from tests.kits.tiny_clip import END, make_tiny_clip
from tests.kits.tiny_encoder import make_tiny_encoder

TEXTS = ["the quick brown fox", "paris", "over the lazy dog " * 9]


async def result(engine: Engine, prompt: Any, task: Any) -> list[float]:
    async with engine.generate(prompt, task=task) as stream:
        found = [delta.result async for delta in stream][-1]
    assert isinstance(found, Vector)
    return list(memoryview(found.values).cast("f"))


async def test_an_encoder_embeds_texts_of_its_whole_context(tmp_path: Path) -> None:
    model: Any = make_tiny_encoder(tmp_path)
    async with small_engine(tmp_path) as engine:
        assert engine.model_info is not None
        assert (engine.model_info.cache_bytes, engine.context_length) == (0, 64)
        prompts = [await engine.tokenize(text) for text in TEXTS] * 5 + [[5] * 64]
        assert prompts[0][0] == 2  # with the tokenizer's special tokens
        found = await asyncio.gather(*(engine.embed(prompt) for prompt in prompts))
        for prompt, vector in zip(prompts, found, strict=True):
            state = model(torch.tensor([prompt])).last_hidden_state[0, 0]
            assert np.allclose(vector, torch.nn.functional.normalize(state, dim=0).detach(), atol=1e-5)
        with pytest.raises(InvalidRequest, match="has 65 tokens"):
            await engine.embed([5] * 65)
        for refused in (engine.classify("paris"), engine.score("the", "dog")):
            with pytest.raises(InvalidRequest, match=r"This model cannot .* Its tasks are embed\."):
                await refused
        await rest(engine)


async def test_an_encoder_classifies_pairs_of_texts(tmp_path: Path) -> None:
    model: Any = make_tiny_encoder(tmp_path, labels=1)
    async with small_engine(tmp_path) as engine:
        ids, second = await engine.tokenize_pair(TEXTS[0], TEXTS[1])
        assert ids[second - 1] == 3
        types = torch.tensor([[int(place >= second) for place in range(len(ids))]])
        logits = model(torch.tensor([ids]), token_type_ids=types).logits[0].detach()
        assert np.allclose(await result(engine, ids, Classify(activate=False, second=second)), logits, atol=1e-5)
        assert np.allclose(await result(engine, ids, Classify(second=second)), logits.sigmoid(), atol=1e-5)
        await rest(engine)


async def test_a_generating_model_gives_the_chance_of_next_tokens(tiny_model: Path) -> None:
    async with small_engine(tiny_model) as engine:
        params = SamplingParams(max_tokens=1, temperature=0, logprobs=3)
        async with engine.generate([7, 8, 9], params) as stream:
            delta = await anext(stream)
        assert delta.logprobs is not None
        top = delta.logprobs[0].top
        found = await result(engine, [7, 8, 9], NextToken(tuple(one.token_id for one in top)))
        assert found == pytest.approx([one.logprob for one in top], abs=1e-5)
        await rest(engine)


async def test_a_model_served_for_embeddings_makes_nothing_else(tiny_model: Path) -> None:
    async with small_engine(tiny_model) as engine:
        expected = await engine.embed(TEXTS[0])
    async with small_engine(tiny_model, is_embedding=True) as engine:
        assert await engine.embed(TEXTS[0]) == pytest.approx(expected, abs=1e-5)
        with pytest.raises(InvalidRequest, match="cannot generate: it makes vectors"):
            engine.generate(TEXTS[0])
        await rest(engine)


def write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content))


async def test_prompts_of_the_model_stand_before_texts(tmp_path: Path) -> None:
    make_tiny_encoder(tmp_path)
    prompts = {"query": "what is ", "document": ""}
    write_json(tmp_path / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "query"})
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 40, "do_lower_case": True})
    async with small_engine(tmp_path) as engine:
        assert engine.context_length == 40
        plain = await engine.embed("Paris", prompt_name="document")
        assert plain == await engine.embed(await engine.tokenize("paris"))
        for name in (None, "query"):
            found = await engine.embed("Paris", prompt_name=name)
            assert found == await engine.embed(await engine.tokenize("what is paris"))
            assert found != plain
        with pytest.raises(InvalidRequest, match="no prompt 'passage'; its names are document, query") as raised:
            await engine.embed("paris", prompt_name="passage")
        assert raised.value.param == "prompt_name"
        with pytest.raises(InvalidRequest, match="the input is token ids"):
            await engine.embed([5, 6], prompt_name="query")
        await rest(engine)


async def test_long_inputs_are_cut_where_a_request_says_so(tmp_path: Path) -> None:
    make_tiny_encoder(tmp_path)
    long = "over the lazy dog " * 40
    async with small_engine(tmp_path) as engine:
        ids = await engine.tokenize(long[:2000])
        with pytest.raises(InvalidRequest, match="context"):
            await engine.embed(long)
        for truncate, kept in ((-1, 64), (9, 9)):
            expected = await engine.embed([*ids[: kept - 1], 3])
            assert await engine.embed(long, truncate=truncate) == expected
            assert await engine.embed(ids, truncate=truncate) == await engine.embed(ids[:kept])
        for truncate in (0, 65):
            with pytest.raises(InvalidRequest, match="this model takes 1 to 64 tokens"):
                await engine.embed(long, truncate=truncate)
        with pytest.raises(InvalidRequest, match="is for embedding and classifying"):
            engine.generate("x", truncate=3)
        await rest(engine)
    async with small_engine(tmp_path, allow_auto_truncate=True) as engine:
        assert await engine.embed(long) == await engine.embed([*ids[:63], 3])


async def test_clip_embeds_texts_up_to_the_token_that_ends_them(tmp_path: Path) -> None:
    model = make_tiny_clip(tmp_path)
    long = "a Photo of a Cat. " * 9
    async with small_engine(tmp_path) as engine:
        ids = await engine.tokenize(long)
        assert ids == await engine.tokenize(long.lower())
        assert (ids[-1], engine.context_length) == (END, 77)
        with pytest.raises(InvalidRequest, match="context"):
            await engine.embed(long)
        for kept in (77, 9):  # twice, so that the second finds what a prefix cache would keep of the first
            vector = model.get_text_features(torch.tensor([[*ids[: kept - 1], END]])).pooler_output[0]
            expected = torch.nn.functional.normalize(vector, dim=0).detach()
            assert np.allclose(await engine.embed(long, truncate=kept), expected, atol=1e-5)
        await rest(engine)


async def test_the_chance_of_next_tokens_is_not_that_of_a_cut_prompt(tiny_model: Path) -> None:
    async with small_engine(tiny_model, allow_auto_truncate=True) as engine:
        with pytest.raises(InvalidRequest, match="The prompt has 600 tokens"):
            await result(engine, [7] * 600, NextToken((5,)))


async def test_nothing_is_lost_when_a_worker_is_killed_as_it_embeds(tmp_path: Path) -> None:
    make_tiny_encoder(tmp_path)
    async with small_engine(tmp_path, watchdog_timeout=60.0) as engine:
        texts = [f"the quick brown fox number {count}" for count in range(24)]
        expected = [await engine.embed(text) for text in texts]
        halted = asyncio.create_task(halt_in_a_step(engine))
        await asyncio.sleep(0)
        embedding = [asyncio.create_task(engine.embed(text)) for text in texts]
        os.kill(await halted, signal.SIGKILL)
        assert np.allclose(await asyncio.gather(*embedding), expected, atol=1e-5)  # in other batches than alone
        assert engine.describe()["workers"][0]["restarts"] == 1
        await rest(engine)
