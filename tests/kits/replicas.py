"""Engines with several replicas in tests."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from actors.engine.engine import Engine
from actors.engine.replica import Replica
from actors.faults import Fault, FaultPlan
from actors.protocol.requests import SamplingParams
from tests.kits.engines import rest, small_engine
from tests.kits.waiting import PATIENCE, until

__all__ = ["Answer", "Request", "all_decode", "alone", "halted", "kill", "outlives", "replicas", "tokens_of"]

Answer = dict[int, tuple[list[int], str]]
"""The tokens and the text of each choice."""
Request = tuple[Any, str | None]
"""A prompt, and its adapter."""


async def tokens_of(engine: Engine, prompt: Any, params: SamplingParams, adapter: str | None = None) -> Answer:
    answer: Answer = {}
    async for delta in engine.generate(prompt, params, adapter=adapter):
        tokens, text = answer.get(delta.index, ([], ""))
        answer[delta.index] = ([*tokens, *delta.token_ids], text + delta.text)
    return answer


_alone: dict[str, Answer] = {}


async def alone(model: Path, prompts: Sequence[Any], params: SamplingParams, **options: Any) -> list[Answer]:
    """The answer of one worker to each prompt, one prompt at a time. Each is computed once in a process."""
    keys = [repr((model, prompt, params, options)) for prompt in prompts]
    missing = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in _alone}
    if missing:
        async with small_engine(model, **options) as engine:
            for key, prompt in missing.items():
                _alone[key] = await tokens_of(engine, prompt, params)
    return [_alone[key] for key in keys]


def replicas(engine: Engine) -> list[Replica]:
    assert engine._actor_tree is not None
    return engine._actor_tree.replicas


def kill(engine: Engine, replica: int) -> None:
    os.kill(engine.describe()["workers"][replica]["pid"], signal.SIGKILL)


@contextmanager
def halted(engine: Engine, *workers: int) -> Iterator[None]:
    """Inside, the processes of these workers are stopped (SIGSTOP), so that what they run lasts until something else
    has happened, however long that takes."""
    pids = [engine.describe()["workers"][worker]["pid"] for worker in workers]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def all_decode(engine: Engine, count: int = 8) -> None:
    """Wait until ``count`` requests have more than 5 tokens each. The workers of a replica whose requests have them are
    halted meanwhile, so that none ends, however much faster than another replica's they are.
    """
    journals = [replica.journal for replica in replicas(engine)]
    apart = len(journals) > 1 and not engine.arguments.enable_dp_attention  # no step waits for another replica's
    ranks = [worker["rank"]["dp"] for worker in engine.describe()["workers"]]
    reached: set[int] = set()
    with ExitStack() as stack:

        def decode() -> bool:
            if sum(map(len, journals)) != count:
                return False
            for number, journal in enumerate(journals):
                if number not in reached and all(len(entry.output) > 5 for entry in journal.live()):
                    reached.add(number)
                    if apart:
                        workers = [worker for worker, replica in enumerate(ranks) if replica == number]
                        stack.enter_context(halted(engine, *workers))
            return len(reached) == len(journals)

        await until(decode, "not all decode")


async def outlives(
    engine: Engine,
    plan: FaultPlan,
    requests: Sequence[Request],
    params: SamplingParams,
    expected: list[Answer],
    fault: Fault | tuple[int, int],
) -> None:
    """All requests give ``expected`` though a fault happens while they decode, and all workers of the engine are
    replaced once. ``fault``: or a worker and a signal for it."""
    before = [worker["restarts"] for worker in engine.describe()["workers"]]
    readers = [asyncio.create_task(tokens_of(engine, prompt, params, adapter)) for prompt, adapter in requests]
    await all_decode(engine, len(requests))
    if isinstance(fault, Fault):
        plan.add(fault)
    else:
        worker, number = fault
        os.kill(engine.describe()["workers"][worker]["pid"], number)
    async with asyncio.timeout(PATIENCE):
        assert await asyncio.gather(*readers) == expected
    assert plan.pending() == 0
    assert [worker["restarts"] for worker in engine.describe()["workers"]] == [count + 1 for count in before]
    await rest(engine)
