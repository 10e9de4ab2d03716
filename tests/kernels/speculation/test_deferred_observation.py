"""Tokens of drafting steps are observed together with those of the following plain steps, not before."""

import numpy as np
import pytest

from app.understudy import MODEL_DIR
from kernels.speculation.native_drafts import NativeObservation
from kernels.speculation.observe import Backlog
from tests.kits.driver import ints
from tests.kits.speculation.lossless import truth
from tests.kits.speculation.native_loops import GREEDY, OPTIONS, PROMPTS, draft_on, draft_rows


def watched(driver):
    """What the draft is shown, but for what a step of draft tokens shows it itself: tokens of each row."""
    shown, observer = [], driver.runner._loaded.speculator.observer
    see = observer._see

    def spy(seen, *rest):
        shown.append(dict(zip(seen.slots.tolist(), seen.counts.tolist(), strict=True)))
        see(seen, *rest)

    observer._see = spy
    return shown


@pytest.mark.parametrize("algorithm", ["DFLASH", "EAGLE", "EAGLE3", "MTP", "STANDALONE", "NGRAM"])
def test_accepted_tokens_wait_for_the_next_drafts(algorithm, drive):
    driver, _ = draft_rows(drive, algorithm)
    for slot in (1, 2):
        driver.admit(slot, PROMPTS[slot - 1])
        driver.step([(slot, driver.pending(slot))])
    rows = [(1, 1), (2, 1)]
    driver.step(rows, {1: 4, 2: 4})
    shown = watched(driver)
    for plain in (1, 2, 3, 5, 8):
        accepted = ints(driver.step(rows, {1: 4, 2: 4}).accepted)
        shown.clear()
        for _ in range(plain):
            driver.step(rows)
        assert not shown
        driver.step(rows, {1: 4, 2: 4})
        assert shown == [{slot: count + plain for slot, count in zip((1, 2), accepted, strict=True)}]
    drafted = draft_on(driver, 12)
    assert np.mean(drafted) > 1.4
    expected = truth(drive, MODEL_DIR, PROMPTS[:2], GREEDY[:2], 300, **OPTIONS)[0]
    for slot in (1, 2):
        assert driver.tokens[slot] == expected[slot - 1][: len(driver.tokens[slot])]


def test_drafts_equal_those_after_an_immediate_observation(drive):
    """A step with draft tokens and a plain one in turns; and the same tokens as a prompt."""
    driver, _ = draft_rows(drive, "EAGLE3")
    found = []
    for number, prompt in enumerate(PROMPTS[:3], 1):
        driver.admit(number, prompt)
        driver.step([(number, driver.pending(number))])
        late, known = [], []
        for _ in range(10):
            driver.step([(number, 1)], {number: 4})
            driver.step([(number, 1)])
            known.append(list(driver.tokens[number]))
            late.append(ints(driver.step([(number, 1)], {number: 4}).accepted)[0])
        driver.release(number)
        at_once = []
        for tokens in known:
            driver.admit(number, tokens[:-1])
            driver.step([(number, driver.pending(number))])
            at_once.append(ints(driver.step([(number, 1)], {number: 4}).accepted)[0])
            driver.release(number)
        found.append((sum(late), sum(at_once)))
    late, at_once = (sum(part) for part in zip(*found, strict=True))
    assert at_once > 40
    assert late > 0.9 * at_once


def test_tokens_without_room_are_observed_at_once(drive):
    driver, _ = draft_rows(drive, "EAGLE")
    driver.admit(1, PROMPTS[0])
    driver.step([(1, driver.pending(1))])
    driver.step([(1, 1)])
    (accepted,) = ints(driver.step([(1, 1)], {1: 4}).accepted)
    shown, kept = watched(driver), driver.runner._loaded.speculator.observer._deferred
    kept._max_steps = 2
    driver.step([(1, 1)])
    assert shown == [{1: accepted}, {1: 1}]
    kept._max_steps = 64
    for _ in range(3):
        driver.step([(1, 1)])
    driver.step([(1, 1)], {1: 4})
    assert shown[2:] == [{1: 3}]
    expected = truth(drive, MODEL_DIR, PROMPTS[:1], GREEDY[:1], 60, **OPTIONS)[0]
    assert driver.tokens[1] == expected[0][: len(driver.tokens[1])]


def test_what_does_not_fit_is_not_kept(drive):
    """Neither tokens of a slot nor of all slots; and what fits has its features and positions."""
    driver, _ = draft_rows(drive, "EAGLE")
    state = driver.runner._loaded.slots
    driver.admit(1, PROMPTS[0])
    driver.step([(1, driver.pending(1))])
    slots, generations = np.ones(1, dtype=np.int64), state.generation[[1]]
    features = np.arange(4 * 200, dtype=np.int16).reshape(200, 4)

    def seen(count):
        places = np.arange(count) * 2
        return NativeObservation(slots, slots * 7, slots * count, features, places)

    kept = Backlog(state, 4)
    assert not kept.add_accepted(seen(kept._max_steps), generations)
    assert kept.is_empty
    kept._full = 3
    assert not kept.add_accepted(seen(3), generations)
    assert kept.is_empty
    kept._full = 4
    assert kept.add_accepted(seen(3), generations)
    found = kept.take()
    assert (found.slots.tolist(), found.starts.tolist(), found.counts.tolist()) == ([1], [7], [3])
    assert (found.features[found.places] == features[[0, 2, 4]]).all()
    kept._full, kept._max_steps = 100, 8
    assert [kept.add_accepted(seen(3), generations) for _ in range(3)] == [True, True, False]
