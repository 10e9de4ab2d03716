"""Unobserved steps equal those of a runner without a draft, and later drafts are right."""

import msgspec
import numpy as np
import pytest

from actors.scheduling.speculation.policy import CONSTANTS
from app.understudy import MODEL_DIR
from kernels.contract.speculation import AdaptiveSettings
from kernels.contract.step import SlotSampling
from kernels.models.decoder import Decoder
from tests.kits.driver import ints
from tests.kits.executors import find_executor
from tests.kits.native import needs_native
from tests.kits.speculation.lossless import truth
from tests.kits.speculation.native_loops import GREEDY, OPTIONS, PROMPTS, draft_on, draft_rows, drafting

ADAPTIVE = {"adaptive": AdaptiveSettings(enabled=True)}


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "DFLASH", "STANDALONE", "NGRAM"])
def test_drafts_are_right_a_few_steps_after_unobserved_ones(algorithm, drive):
    """Prompts and decodes, some of requests that are gone by then."""
    driver, rows = draft_rows(drive, algorithm, **ADAPTIVE)
    speculator, shown, plain = driver.runner._loaded.speculator, [], []
    decode, ends = (find_executor(driver.runner, kind, True) for kind in ("NativeDecode", "NativePrefill"))
    see, run, reach = speculator.observer._see, decode.advance, ends.run
    speculator.observer._see = lambda seen, *rest: shown.extend(seen.counts.tolist()) or see(seen, *rest)
    decode.advance = lambda: plain.append(len(decode._slots)) or run()
    ends.run = lambda batch: plain.append("ends") or reach(batch)
    prompts = [PROMPTS[0], [token for _ in range(3) for token in PROMPTS[3]]]
    driver.admit(1, prompts[0])
    driver.step([(1, driver.pending(1))], unobserved=True)
    for _ in range(20):
        driver.step([(1, 1)], unobserved=True)
    driver.admit(2, prompts[1])
    driver.step([(1, 1), (2, 70)], unobserved=True)  # a part of a prompt, which is left to others
    driver.step([(1, 1), (2, driver.pending(2))], unobserved=True)
    driver.admit(3, PROMPTS[1])
    driver.step([(1, 1), (2, 1), (3, driver.pending(3))], unobserved=True)
    driver.release(3)
    for _ in range(40):
        driver.step([(1, 1), (2, 1)], unobserved=True)
    assert plain == ["ends"] + [1] * 20 + ["ends"] * 3 + [2] * 40
    assert speculator.observer.is_empty
    for _ in range(CONSTANTS.awake_steps):
        driver.step([(1, 1), (2, 1)])
    assert (shown, rows) == ([], [])
    accepted = draft_on(driver, 12)
    assert shown[:2] == [CONSTANTS.awake_steps, CONSTANTS.awake_steps]
    assert rows[-8:] == [2] * 8
    assert np.mean(accepted) > 1.2
    expected = truth(drive, MODEL_DIR, prompts, GREEDY[:2], 300, **OPTIONS)[0]
    for slot in (1, 2):
        assert driver.tokens[slot] == expected[slot - 1][: len(driver.tokens[slot])]


def test_an_unobserved_step_keeps_no_captured_layers(drive):
    """Captured layers are not even brought together."""
    driver, _ = draft_rows(drive, "EAGLE3", **ADAPTIVE)
    features = find_executor(driver.runner, "NativeDecode")._features
    driver.admit(1, PROMPTS[0])
    driver.step([(1, driver.pending(1))])
    driver.step([(1, 1)])
    before = features[:4].copy()
    for _ in range(3):
        driver.step([(1, 1)], unobserved=True)
        assert (features[:4] == before).all()
    driver.step([(1, 1)])
    assert (features[:1] != before[:1]).any()


@pytest.mark.parametrize(("more", "passes"), [(ADAPTIVE, 2), ({}, 0)], ids=["adaptive", "always"])
def test_passes_without_captured_layers_exist_for_unobserved_steps(more, passes, drive, monkeypatch):
    """Steps of decodes, and of short prompts."""
    prepared, forward = [], Decoder.forward

    def spy(self, batch, caches, capture=True):
        prepared.append(capture)
        return forward(self, batch, caches, capture)

    monkeypatch.setattr(Decoder, "forward", spy)
    draft_rows(drive, "EAGLE3", **more)
    assert prepared.count(False) == passes


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(OPTIONS, marks=needs_native, id="native"),
        pytest.param(OPTIONS | {"dtype": "float32"}, id="general"),
    ],
)
@pytest.mark.parametrize("algorithm", ["EAGLE3", "NGRAM"])
def test_unobserved_steps_may_begin_and_end_at_any_time(algorithm, options, drive):
    """Right behind draft tokens, prompts and each other; beside a request that is never to draft."""
    driver = drive(MODEL_DIR, speculation=drafting(algorithm, **ADAPTIVE), **options)
    never = msgspec.structs.replace(GREEDY[0], max_drafts=0)
    driver.admit(1, PROMPTS[0])
    driver.step([(1, driver.pending(1))])
    draft_tokens = []
    for number in range(16):
        if number == 5:
            driver.admit(2, PROMPTS[1])
            driver.step([(1, 1), (2, driver.pending(2))], unobserved=True)
        if number == 9:
            driver.admit(3, PROMPTS[2], sampling=never)
            driver.step([(1, 1), (2, 1), (3, driver.pending(3))])
        slots = [1, *([2] if number > 4 else []), *([3] if number > 8 else [])]
        for _ in range(number % 3):
            driver.step([(slot, 1) for slot in slots], unobserved=True)
        for _ in range(number % 4):
            driver.step([(slot, 1) for slot in slots])
        result = driver.step([(slot, 1) for slot in slots], {slot: 4 for slot in slots if slot < 3})
        draft_tokens.append(max(ints(result.drafted), default=0))
    assert any(draft_tokens)
    expected = truth(drive, MODEL_DIR, PROMPTS[:3], GREEDY[:3], 130, **options)[0]
    for slot in (1, 2, 3):
        assert driver.tokens[slot] == expected[slot - 1][: len(driver.tokens[slot])]


def test_n_grams_learn_unobserved_tokens_at_the_next_observation(drive):
    driver, _ = draft_rows(drive, "NGRAM", **ADAPTIVE)
    drafter = driver.runner._loaded.speculator.drafter
    driver.admit(1, PROMPTS[0])
    driver.step([(1, driver.pending(1))], unobserved=True)
    for _ in range(30):
        driver.step([(1, 1)], unobserved=True)
    reported = drafter._extended[1]
    driver.step([(1, 1)])
    assert drafter._extended[1] == reported == 1
    new, extend = [], drafter._trie.extend
    drafter._trie.extend = lambda sequence, tokens: new.append(tokens) or extend(sequence, tokens)
    known = list(driver.tokens[1])
    driver.step([(1, 1)], {1: 4})
    assert new[0] == known[1:]


def test_an_unobserved_row_is_unchanged_beside_an_n_gram_row(drive):
    """It sat out the steps that were."""
    driver, rows = draft_rows(drive, "NGRAM", **ADAPTIVE)
    expected = truth(drive, MODEL_DIR, PROMPTS[:2], GREEDY[:2], 100, **OPTIONS)[0]
    driver.admit(3, expected[0])
    driver.step([(3, driver.pending(3))])
    for slot in (1, 2):
        driver.admit(slot, PROMPTS[slot - 1])
        driver.step([(slot, driver.pending(slot))])
    for _ in range(6):
        driver.step([(1, 1), (2, 1)], unobserved=True)
    driver.step([(1, 1)])
    driver.step([(1, 1)])
    result = driver.step([(1, 1), (2, 1)], {1: 4, 2: 4})
    assert rows == [2]
    assert ints(result.drafted)[0] > 0 == ints(result.drafted)[1]
    for slot in (1, 2):
        assert driver.tokens[slot] == expected[slot - 1][: len(driver.tokens[slot])]


def test_pending_observations_are_dropped(drive):
    """Decodes that are kept, what was accepted last, and a prompt."""
    driver, _ = draft_rows(drive, "EAGLE", **ADAPTIVE)
    speculator = driver.runner._loaded.speculator
    driver.admit(1, PROMPTS[0])
    driver.step([(1, driver.pending(1))])
    assert speculator._prompts is not None
    driver.step([(1, 1)], unobserved=True)
    assert speculator._prompts is None
    driver.step([(1, 1)])
    assert not speculator.observer.is_empty
    driver.step([(1, 1)], unobserved=True)
    assert speculator.observer.is_empty
    for _ in range(2):
        driver.step([(1, 1)])
    driver.step([(1, 1)], {1: 4})
    assert speculator._accepted is not None
    driver.step([(1, 1)], unobserved=True)
    assert speculator._accepted is None


def test_deferred_observations_are_dropped_on_devices_that_hold_them(drive):
    driver = drive(MODEL_DIR, speculation=drafting("EAGLE", **ADAPTIVE), dtype="float32", page_size=16)
    speculator = driver.runner._loaded.speculator
    driver.admit(1, PROMPTS[0])
    driver.step([(1, driver.pending(1))])
    for _ in range(3):
        driver.step([(1, 1)])
    assert not speculator.observer.is_empty
    driver.step([(1, 1)], unobserved=True)
    assert speculator.observer.is_empty
    assert speculator._last is None


def test_a_sampled_request_generates_the_same_unobserved(drive):
    driver, _ = draft_rows(drive, "EAGLE", **ADAPTIVE)
    sampling = SlotSampling(temperature=0.9, seed=4)
    for slot, unseen in ((1, False), (2, True)):
        driver.admit(slot, PROMPTS[1], sampling=sampling)
        driver.step([(slot, driver.pending(slot))], unobserved=unseen)
        for _ in range(20):
            driver.step([(slot, 1)], unobserved=unseen)
    assert driver.tokens[1] == driver.tokens[2]
