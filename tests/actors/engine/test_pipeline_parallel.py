"""An engine whose model runs in stages: it says what one worker says, and outlives the death of any stage."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from actors.boards.stream_buffer import merge
from actors.engine.engine import Engine
from actors.protocol.requests import SamplingParams
from actors.requests.streams import RequestStream
from kernels.contract.grammar import Grammar
from tests.kits import engines
from tests.kits.waiting import PATIENCE

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, seed=11, max_tokens=24, ignore_eos=True)
PROMPTS = ["Once upon", "The quick brown fox " * 12, "one two three"]

small_engine = partial(engines.small_engine, device="cpu", standby_worker=False)


async def read_out(stream: RequestStream) -> list[int]:
    async with asyncio.timeout(PATIENCE):
        return list(merge([delta async for delta in stream]).token_ids)


async def say(engine: Engine) -> list[list[int]]:
    cases = [(prompt, params) for prompt in PROMPTS for params in (GREEDY, SAMPLED)]
    return list(await asyncio.gather(*(read_out(engine.generate(*question)) for question in cases)))


def pids(engine: Engine) -> list[int]:
    return [int(worker["pid"] or 0) for worker in engine.describe()["workers"]]


@pytest.mark.long
async def test_two_stages_say_what_one_worker_says_and_outlive_a_kill(tiny_model: Path) -> None:
    async with small_engine(tiny_model) as engine:
        expected = await say(engine)
        long = await read_out(engine.generate("Once upon", LONG))
        alone = engine.model_info
    async with small_engine(tiny_model, pp=2) as engine:
        assert [worker["name"] for worker in engine.describe()["workers"]] == ["worker-0", "worker-1"]
        assert alone is not None
        assert engine.model_info is not None  # of both stages
        assert engine.model_info.cache_bytes == alone.cache_bytes
        assert engine.model_info.weight_bytes >= alone.weight_bytes
        assert await say(engine) == expected
        counted = engine.board.all[0]._counted.readings()
        whole: Any = counted["troupe_pipeline_seconds_total"]
        stages: Any = counted["troupe_pipeline_stage_seconds_total"]
        assert set(stages) == {("0", "worker-0"), ("0", "worker-1")}
        assert all(0 < seconds < whole["0",] for seconds in stages.values())
        assert await say(engine) == expected
        for worker in (0, 1):
            before = pids(engine)
            stream = engine.generate("Once upon", LONG)
            first = await anext(stream)
            os.kill(before[worker], signal.SIGKILL)
            assert [*first.token_ids, *await read_out(stream)] == long
            assert not set(before) & set(pids(engine))
        assert await say(engine) == expected


@pytest.mark.long
async def test_stages_follow_grammars_penalties_scores_and_aborts(tiny_model: Path) -> None:
    cases = [
        SamplingParams(max_tokens=40, seed=5, temperature=1.0, grammar=Grammar("regex", "(ab|cd){60}")),
        SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, repetition_penalty=1.3, presence_penalty=0.5),
        SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, logprobs=3, prompt_logprobs=2),
    ]

    async def answers(engine: Engine) -> list[tuple[object, ...]]:
        given_up = [engine.generate(prompt, LONG) for prompt in PROMPTS]
        for stream in given_up:
            await anext(stream)
        others = [asyncio.create_task(whole(engine, prompt, case)) for prompt in PROMPTS for case in cases]
        for stream in given_up:
            await stream.aclose()
        return list(await asyncio.gather(*others))

    async def whole(engine: Engine, prompt: str, params: SamplingParams) -> tuple[object, ...]:
        async with asyncio.timeout(PATIENCE):
            delta = merge([delta async for delta in engine.generate(prompt, params)])
        scores = (*delta.logprobs, *(delta.prompt_logprobs or ())) if delta.logprobs else ()
        rounded = [None if score.logprob is None else round(score.logprob, 3) for score in scores]
        return tuple(delta.token_ids), delta.text, str(rounded)

    async with small_engine(tiny_model) as engine:
        expected = await answers(engine)
    async with small_engine(tiny_model, pp=2, pp_async_batch_depth=1, pp_max_micro_batch_size=3) as engine:
        assert await answers(engine) == expected
    drafted = partial(small_engine, pp=2, speculative_algorithm="NGRAM", pp_async_batch_depth=1)
    async with drafted(tiny_model, pp_max_micro_batch_size=3) as engine:
        assert await answers(engine) == expected


@pytest.mark.long
async def test_stages_accept_draft_tokens_and_outlive_a_kill(tiny_model: Path) -> None:
    async with small_engine(tiny_model) as engine:
        expected = await say(engine)
        long = await read_out(engine.generate("Once upon", LONG))
    drafted = partial(small_engine, pp=2, speculative_algorithm="NGRAM", chunked_prefill_size=32)
    async with drafted(tiny_model) as engine:
        assert await say(engine) == expected
        assert await say(engine) == expected  # from the prefix cache
        assert engine.metrics.steps.speculation.accepted > 20
        for worker in (0, 1):
            stream = engine.generate("Once upon", LONG)
            first = await anext(stream)
            os.kill(pids(engine)[worker], signal.SIGKILL)
            assert [*first.token_ids, *await read_out(stream)] == long
