"""Grammars on a simulated NPU, whose tokens come to the host one step late."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import shutil

import pytest

from actors.boards.stream_buffer import merge
from actors.engine.engine import Engine
from actors.protocol.requests import Grammar, SamplingParams
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
