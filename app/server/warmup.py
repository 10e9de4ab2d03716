"""Warm-up requests before the first client's: they run every kind of step once."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from typing import TYPE_CHECKING

from actors.engine.configuration import chunk_size
from actors.protocol.requests import SamplingParams
from actors.workers.placement import place
from kernels.contract.tasks import Classify, Embed, Generate, Task

if TYPE_CHECKING:
    from actors.engine.engine import Engine
    from actors.options import Arguments

__all__ = ["probe_task", "warm_up"]

log = logging.getLogger("troupe")

_ANSWER = 4  # tokens


async def warm_up(engine: Engine, arguments: Arguments) -> None:
    """Run the server's ``--warmups`` without a trace in the prefix cache and the latency metrics.

    A failure is logged, and the server serves nevertheless.
    """
    room = engine.context_length - _ANSWER
    prompts: list[list[list[int]]] = []
    for name in arguments.warmups:
        if name == "generate":
            prompts.append([_ids(engine, 8, room)])
        elif name == "long-prompt":
            prompts.append([_ids(engine, max(chunk_size(arguments, place(arguments, os.environ)), 8), room)])
        else:
            prompts.append([_ids(engine, 8 + number % 8, room) for number in range(arguments.max_running_requests)])
    steps = engine.metrics.steps
    steps.warming_up = True
    try:
        for together in prompts:
            await asyncio.gather(*(_answer(engine, prompt) for prompt in together))
        await engine.flush_cache()
    except Exception:
        log.exception("the warm-up failed; the server is ready without it")
    finally:
        steps.warming_up = False


def probe_task(engine: Engine) -> Task:
    """The simplest task of the model."""
    info = engine.model_info
    if info is None or info.pooling is None:
        return Generate()
    return Embed() if info.pooling.task == "embed" else Classify()


def _ids(engine: Engine, length: int, room: int) -> list[int]:
    return [number % engine.vocab_size for number in range(max(1, min(length, room)))]


async def _answer(engine: Engine, prompt: list[int]) -> None:
    params = SamplingParams(max_tokens=_ANSWER, temperature=0.0, ignore_eos=True)
    task = probe_task(engine)
    timeline = engine.timelines.open(
        f"warm-up-{secrets.token_hex(6)}", operation="text_completion", model=engine.model_name, probe=True
    )
    async for _ in engine.generate(prompt, params, request_id="warm-up", timeline=timeline, task=task):
        pass
