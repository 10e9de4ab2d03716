"""An engine on simulated NPUs, and its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from actors.boards.stream_buffer import merge
from actors.engine.engine import Engine
from actors.protocol.requests import SamplingParams

__all__ = [
    "CLOSE",
    "GREEDY",
    "MODEL",
    "PROMPTS",
    "SAMPLED",
    "all_tokens",
    "serving",
    "tokens_of",
]

MODEL = str(Path(__file__).parents[2] / "app" / "understudy" / "model")

CLOSE = 0.25
"""Tolerance of log-probabilities: larger than the effect of bfloat16's 8 bits over the 8 layers of this model."""

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was",
    "What is 3 plus 4?",
    "one two three four five six seven eight nine ten " * 16,
    "My name is Anna and I live in Paris. " * 20,
    "How do you say good morning?",
]

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, seed=11, max_tokens=24, ignore_eos=True)


@asynccontextmanager
async def serving(**keywords: Any) -> AsyncIterator[Engine]:
    options: dict[str, Any] = {"max_running_requests": 8, "chunked_prefill_size": 64, "max_total_tokens": 4096}
    async with Engine(model=MODEL, **(options | keywords)) as engine:
        yield engine


async def tokens_of(engine: Engine, prompt: str | list[int], params: SamplingParams = GREEDY) -> list[int]:
    return list(merge([delta async for delta in engine.generate(prompt, params)]).token_ids)


async def all_tokens(engine: Engine, params: SamplingParams = GREEDY) -> list[list[int]]:
    return list(await asyncio.gather(*(tokens_of(engine, prompt, params) for prompt in PROMPTS)))
