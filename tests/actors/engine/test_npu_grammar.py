"""Grammars on a simulated NPU, whose tokens come to the host one step late."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import shutil
from typing import Any

import pytest

from actors.boards.stream_buffer import merge
from actors.engine.engine import Engine
from actors.protocol.requests import Grammar, SamplingParams
from app.understudy.drafts import draft_arguments
from tests.kits.npu_engine import GREEDY, PROMPTS, serving, tokens_of

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("torch_npu") is None, reason="torch_npu is not installed: pip install -e '.[npu-sim]'"
    ),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="the NPU simulator needs gcc and nm (binutils)"),
]

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


async def text_of(engine: Engine, grammar: Grammar, seed: int) -> str:
    params = SamplingParams(
        temperature=1.0, seed=seed, max_tokens=100, grammar=grammar, logprobs=0 if seed == 2 else None
    )
    return merge([delta async for delta in engine.generate(PROMPTS[seed], params)]).text


@pytest.mark.parametrize("algorithm", ["NGRAM", "EAGLE3"])
async def test_draft_tokens_are_accepted_in_texts_with_a_grammar(algorithm: str) -> None:
    grammar, found = Grammar("regex", "(ab|cd){12}(once upon a time){3}"), []
    options: dict[str, Any] = {"speculative_algorithm": algorithm} | draft_arguments(algorithm)
    async with serving(npu_simulator="A2", dtype="float32", **options) as engine:
        for drafts in (False, True):
            params = SamplingParams(temperature=0.7, seed=4, max_tokens=100, grammar=grammar, speculative=drafts)
            found.append(merge([delta async for delta in engine.generate(PROMPTS[0], params)]))
    assert re.fullmatch(grammar.text, found[0].text)
    assert found[0].text == found[1].text
    plain, drafted = (delta.usage.acceptance for delta in found)
    assert plain is None
    assert drafted is not None
    assert drafted.accepted > 0


async def test_texts_match_their_grammars_beside_other_rows() -> None:
    async with serving(npu_simulator="A2", dtype="float32") as engine:
        alone = await tokens_of(engine, PROMPTS[0])
        *texts, beside = await asyncio.gather(
            *(text_of(engine, Grammar("regex", "(ab|cd){12}"), seed) for seed in range(3)),
            text_of(engine, Grammar("json_schema", json.dumps(SCHEMA)), 3),
            tokens_of(engine, PROMPTS[0], GREEDY),
        )
        assert beside == alone
        for text in texts[:3]:
            assert re.fullmatch("(ab|cd){12}", text)
        assert set(json.loads(texts[3])) == {"a", "b"}
