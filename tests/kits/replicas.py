"""Engines with several replicas in tests."""

from __future__ import annotations

import os
import signal
from typing import Any

from actors.engine.engine import Engine
from actors.engine.replica import Replica
from actors.protocol.requests import SamplingParams
from tests.kits.waiting import until

__all__ = ["Answer", "all_decode", "kill", "replicas", "tokens_of"]

Answer = dict[int, tuple[list[int], str]]
"""The tokens and the text of each choice."""


async def tokens_of(engine: Engine, prompt: Any, params: SamplingParams) -> Answer:
    answer: Answer = {}
    async for delta in engine.generate(prompt, params):
        tokens, text = answer.get(delta.index, ([], ""))
        answer[delta.index] = ([*tokens, *delta.token_ids], text + delta.text)
    return answer


def replicas(engine: Engine) -> list[Replica]:
    assert engine._actor_tree is not None
    return engine._actor_tree.replicas


def kill(engine: Engine, replica: int) -> None:
    os.kill(engine.describe()["workers"][replica]["pid"], signal.SIGKILL)


async def all_decode(engine: Engine, count: int = 8) -> None:
    journals = [replica.journal for replica in replicas(engine)]
    await until(
        lambda: sum(map(len, journals)) == count and all(len(e.output) > 5 for j in journals for e in j.live()),
        "not all decode",
    )
