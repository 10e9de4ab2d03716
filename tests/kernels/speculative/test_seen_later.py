"""What guesses leave behind is shown to the draft with the plain steps that follow, not before the first of them."""

import numpy as np
import pytest

from app.understudy import MODEL_DIR
from kernels.speculative.host_drafts import SeenHere
from kernels.speculative.unseen import Unseen
from tests.kernels.conftest import ints
from tests.kernels.speculative.test_lossless_runner import truth
from tests.kernels.speculative.test_steady_chains import ASKED, GREEDY, OPTIONS, guess_on, guessing


def watched(driver):
    """What the draft is shown, but for what a step of guesses shows it itself: tokens of each row."""
    shown, observer = [], driver.runner._speculator.observer
    see = observer._see

    def spy(seen, *rest):
        shown.append(dict(zip(seen.slots.tolist(), seen.counts.tolist(), strict=True)))
        see(seen, *rest)

    observer._see = spy
    return shown


@pytest.mark.parametrize("algorithm", ["DFLASH", "EAGLE", "EAGLE3", "MTP", "STANDALONE", "NGRAM"])
def test_what_was_accepted_waits_for_the_next_guesses(algorithm, drive):
    driver, _ = guessing(drive, algorithm)
    for slot in (1, 2):
        driver.admit(slot, ASKED[slot - 1])
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
    guessed = guess_on(driver, 12)
    assert np.mean(guessed) > 1.4
    said = truth(drive, MODEL_DIR, ASKED[:2], GREEDY[:2], 300, **OPTIONS)[0]
    for slot in (1, 2):
        assert driver.tokens[slot] == said[slot - 1][: len(driver.tokens[slot])]


def test_the_draft_guesses_as_well_as_if_it_had_seen_it_at_once(drive):
    """A step with guesses and a plain one in turns; and the same tokens as a prompt."""
    driver, _ = guessing(drive, "EAGLE3")
    found = []
    for number, prompt in enumerate(ASKED[:3], 1):
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


def test_what_there_is_no_room_for_is_shown_at_once(drive):
    driver, _ = guessing(drive, "EAGLE")
    driver.admit(1, ASKED[0])
    driver.step([(1, driver.pending(1))])
    driver.step([(1, 1)])
    driver.step([(1, 1)], {1: 4})
    shown, kept = watched(driver), driver.runner._speculator.observer._unseen
    kept._most = 2
    driver.step([(1, 1)])
    assert shown == [{1: 4}, {1: 1}]
    kept._most = 64
    for _ in range(3):
        driver.step([(1, 1)])
    driver.step([(1, 1)], {1: 4})
    assert shown[2:] == [{1: 3}]
    said = truth(drive, MODEL_DIR, ASKED[:1], GREEDY[:1], 60, **OPTIONS)[0]
    assert driver.tokens[1] == said[0][: len(driver.tokens[1])]


def test_what_does_not_fit_is_not_kept(drive):
    """Neither tokens of a slot nor of all slots; and what fits has its features and positions."""
    driver, _ = guessing(drive, "EAGLE")
    state = driver.runner._slots
    driver.admit(1, ASKED[0])
    driver.step([(1, driver.pending(1))])
    slots, generations = np.ones(1, dtype=np.int64), state.generation[[1]]
    features = np.arange(4 * 200, dtype=np.int16).reshape(200, 4)

    def seen(count):
        places = np.arange(count) * 2
        return SeenHere(slots, slots * 7, slots * count, features, places)

    kept = Unseen(state, 4)
    assert not kept.accepted(seen(kept._most), generations)
    assert kept.empty
    kept._full = 3
    assert not kept.accepted(seen(3), generations)
    assert kept.empty
    kept._full = 4
    assert kept.accepted(seen(3), generations)
    found = kept.take()
    assert (found.slots.tolist(), found.starts.tolist(), found.counts.tolist()) == ([1], [7], [3])
    assert (found.features[found.places] == features[[0, 2, 4]]).all()
    kept._full, kept._most = 100, 8
    assert [kept.accepted(seen(3), generations) for _ in range(3)] == [True, True, False]
