"""Steps of chains that run in a few calls say what others do, and stand aside where they are not meant."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from app.understudy import MODEL_DIR
from app.understudy.drafts import draft_arguments
from kernels.speculative.settings import SpeculativeSettings
from kernels.step import SlotSampling
from tests.kernels.speculative.oracles import run_mixed
from tests.kernels.speculative.test_lossless_runner import truth

ASKED = [
    [random.Random(seed).randrange(300, 4096) for _ in range(length)] for seed, length in enumerate((5, 23, 17, 40))
]
GREEDY = [SlotSampling(temperature=0.0)] * len(ASKED)
LENGTH = 110
OPTIONS = {"dtype": "auto", "page_size": 16}


@pytest.fixture(scope="module")
def said():
    return {}


def guessing(drive, algorithm):
    """A driver with the draft in the box, and the rows of the steps of chains that it ran."""
    found = {name.removeprefix("speculative_"): value for name, value in draft_arguments(algorithm).items()}
    steps = found.pop("num_steps", found["num_draft_tokens"] - 1)
    found["topk"] = found.pop("eagle_topk", 1)
    driver = drive(MODEL_DIR, speculation=SpeculativeSettings(algorithm, num_steps=steps, **found), **OPTIONS)
    chains = driver.runner._captured.chains
    if chains is None:
        pytest.skip("this processor has no native operators, or they are not compiled yet")
    rows, run = [], chains.run

    def spy(batch, drafted, counts):
        rows.append(len(counts))
        return run(batch, drafted, counts)

    chains.run = spy
    return driver, rows


@pytest.mark.parametrize("algorithm", ["DFLASH", "EAGLE", "EAGLE3", "MTP", "STANDALONE"])
def test_chains_change_nothing(algorithm, drive, said):
    driver, rows = guessing(drive, algorithm)
    if not said:
        said[0] = truth(drive, MODEL_DIR, ASKED, GREEDY, LENGTH + 20, **OPTIONS)[0]
    told = []
    found, _ = run_mixed(driver, ASKED, GREEDY, said[0], LENGTH, told=told)
    assert found == [tokens[:LENGTH] for tokens in said[0]]
    assert set(rows) >= {1, 2}
    drafted, _ = np.array(told).T
    assert drafted.mean() > 0.5  # a draft that sees the wrong tokens guesses none


def test_sampled_rows_are_not_theirs(drive):
    driver, rows = guessing(drive, "DFLASH")
    driver.admit(1, ASKED[0], sampling=SlotSampling(temperature=0.8, seed=3))
    driver.step([(1, driver.pending(1))])
    driver.step([(1, 1)], {1: 4})
    assert not rows
    driver.release(1)
    driver.admit(1, ASKED[0])
    driver.step([(1, driver.pending(1))])
    driver.step([(1, 1)], {1: 4})
    driver.step([(1, 1)])  # a row without guesses
    assert rows == [1]


def test_a_row_that_is_not_finite_is_left_to_others(drive):
    driver, rows = guessing(drive, "DFLASH")
    driver.admit(1, ASKED[1])
    driver.step([(1, driver.pending(1))])
    driver.step([(1, 1)], {1: 4})
    with torch.inference_mode():
        driver.runner._caches[0][driver.pages[1][0]] = float("nan")
    result = driver.step([(1, 1)], {1: 4})
    assert len(rows) == 2
    assert [error.slot for error in result.failed] == [1]
