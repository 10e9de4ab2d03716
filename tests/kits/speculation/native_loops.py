"""Runners whose decode loops run in native code, with drafts."""

from __future__ import annotations

import random

import pytest

from app.understudy import MODEL_DIR
from app.understudy.drafts import draft_arguments
from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import SlotSampling
from tests.kits.driver import ints
from tests.kits.executors import find_executor
from tests.kits.native import EXACT_DTYPE

__all__ = [
    "GREEDY",
    "OPTIONS",
    "PROMPTS",
    "draft_on",
    "draft_rows",
    "drafting",
]

PROMPTS = [
    [random.Random(seed).randrange(300, 4096) for _ in range(length)] for seed, length in enumerate((5, 23, 17, 40))
]

GREEDY = [SlotSampling(temperature=0.0)] * len(PROMPTS)

OPTIONS = {"dtype": EXACT_DTYPE, "page_size": 16}


def drafting(algorithm, **more):
    """Settings with the included draft."""
    found = {name.removeprefix("speculative_"): value for name, value in draft_arguments(algorithm).items()}
    found.setdefault("num_draft_tokens", 12)
    steps = found.pop("num_steps", found["num_draft_tokens"] - 1)
    found["topk"] = found.pop("eagle_topk", 1)
    return SpeculativeSettings(algorithm, num_steps=steps, **found, **more)


def draft_rows(drive, algorithm, on_run=None, grammar=None, **more):
    """A driver with the included draft, and the rows of the steps that reached its host chains. ``on_run``: called with
    the rows of steps that ran there."""
    driver = drive(MODEL_DIR, speculation=drafting(algorithm, **more), grammar=grammar, **OPTIONS)
    executor = find_executor(driver.runner, "NativeChains")
    if executor is None:
        pytest.skip("this processor has no native operators, or they are not compiled yet")
    chains = executor._loop
    rows, run = [], chains.run

    def spy(batch):
        found = run(batch)
        if found is None or not found.idle:  # a step that they do not take counts too
            rows.append(len(batch.slots) // 4)
        if on_run is not None and found is not None and not found.idle:
            on_run.append(rows[-1])
        return found

    chains.run = spy
    return driver, rows


def draft_on(driver, steps):
    """Accepted numbers of two slots."""
    return [ints(driver.step([(1, 1), (2, 1)], {1: 4, 2: 4}).accepted) for _ in range(steps)]
