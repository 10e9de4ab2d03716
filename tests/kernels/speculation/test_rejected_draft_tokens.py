"""NaN keys and values of rejected draft tokens do not affect other tokens."""

import itertools

import pytest
import torch

from app.understudy import MODEL_DIR
from app.understudy.drafts import draft_path
from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import SlotSampling
from tests.kits.native import needs_native
from tests.kits.speculation.lossless import truth

PROMPT = [(7 * place) % 3000 + 300 for place in range(21)]


def poison(driver, slot):
    """Every place of the slot's pages behind its computed tokens, in the target's caches and in the draft's."""
    size, computed = driver.info.page_size, driver.computed[slot]
    for cache in itertools.chain(driver.runner._loaded.caches, driver.runner._loaded.draft_caches):
        for column, page in enumerate(driver.pages[slot]):
            first = max(0, computed - column * size)
            if first < size:
                cache[page, first:] = float("nan")


@pytest.mark.parametrize("dtype", [pytest.param("auto", marks=needs_native), "float32"])
@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("sampling", [SlotSampling(temperature=0.0), SlotSampling(temperature=0.7, seed=5)])
def test_places_of_rejected_drafts_are_not_read(dtype, topk, sampling, drive):
    options = {"dtype": dtype, "page_size": 16}
    expected = truth(drive, MODEL_DIR, [PROMPT], [sampling], len(PROMPT) + 60, **options)[0][0]
    speculation = SpeculativeSettings(
        "EAGLE3", draft_model_path=str(draft_path("EAGLE3")), num_steps=4, topk=topk, num_draft_tokens=5
    )
    driver = drive(MODEL_DIR, speculation=speculation, **options)
    driver.admit(1, PROMPT, sampling=sampling)
    driver.step([(1, driver.pending(1))])
    for number in range(18):
        with torch.inference_mode():
            poison(driver, 1)
        most = (4, 0, 2, 1)[number % 4]
        result = driver.step([(1, 1)], {1: most} if most else None)
        assert not result.failed
    assert driver.tokens[1] == expected[: len(driver.tokens[1])]
