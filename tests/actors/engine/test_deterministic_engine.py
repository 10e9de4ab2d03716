"""Answers of the included model with --enable-deterministic-inference: the same in any batch, chunked or drafted."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from actors.engine.engine import Engine
from actors.protocol.requests import Chat, SamplingParams
from app.understudy import MODEL_DIR
from app.understudy.drafts import draft_path
from tests.kits.engines import small_engine
from tests.kits.waiting import until

QUESTIONS = ("What is the capital of Norway?", "Tell me a short story about a fox.", "What is 12 plus 30?")
RULES = "Answer in one sentence. Be friendly, be short, and never draft. " * 4
"""A prefix that all share, longer than a page and than some chunks."""


def engine(**options: object) -> Engine:
    return small_engine(
        MODEL_DIR, device="cpu", dtype="bfloat16", enable_deterministic_inference=True, max_total_tokens=8192, **options
    )


async def answer(running: Engine, question: str, temperature: float) -> list[int]:
    params = SamplingParams(
        max_tokens=24, temperature=temperature, top_p=0.95 if temperature else 1.0, seed=7, ignore_eos=True
    )
    chat = Chat(messages=[{"role": "system", "content": RULES}, {"role": "user", "content": question}])
    return [token async for delta in running.generate(chat, params) for token in delta.token_ids]


async def answers(running: Engine) -> list[list[int]]:
    """Greedy ones, sampled ones, and one of them twice, all asked at once."""
    prompts = [*((question, temperature) for temperature in (0.0, 0.9) for question in QUESTIONS), (QUESTIONS[0], 0.0)]
    return await asyncio.gather(*(answer(running, *one) for one in prompts))


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """Each by itself, without prefixes that others left."""

    async def ask() -> list[list[int]]:
        async with engine(disable_radix_cache=True) as running:
            found = [await answer(running, question, heat) for heat in (0.0, 0.9) for question in QUESTIONS]
            return [*found, found[0]]

    return asyncio.run(ask())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunked_prefill_size": 16},
        {"speculative_algorithm": "NGRAM"},
        {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(draft_path("EAGLE3")),
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 3,
            "speculative_num_draft_tokens": 8,
            "chunked_prefill_size": 32,
        },
    ],
    ids=["batch", "chunks", "ngram", "eagle3"],
)
async def test_answers_together_are_those_of_each_alone(options: dict[str, object], alone: list[list[int]]) -> None:
    async with engine(**options) as running:
        assert await answers(running) == alone
        assert await answer(running, *(QUESTIONS[1], 0.0)) == alone[1]  # behind a prefix that is in the cache


async def test_answers_go_on_unchanged_after_the_worker_is_killed(alone: list[list[int]]) -> None:
    async with engine(speculative_algorithm="NGRAM") as running:
        prompts = asyncio.create_task(answers(running))
        await until(lambda: bool(running.board.scheduler and running.board.scheduler.running), "nothing runs")
        pid = int(running.describe()["workers"][0]["pid"])
        os.kill(pid, signal.SIGKILL)  # at once: a fast machine takes 50 ms for all
        assert await prompts == alone
        await until(lambda: running.describe()["workers"][0]["pid"] not in (None, pid), "no worker follows")
