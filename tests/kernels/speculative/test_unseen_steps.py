"""Steps that nothing is kept of for a draft are those of a runner without one, and guesses behind them are right."""

import msgspec
import numpy as np
import pytest

from app.understudy import MODEL_DIR
from kernels.models.decoder import Decoder
from kernels.speculative.settings import AdaptiveSettings
from kernels.speculative.sleep import SHOWN
from kernels.step import SlotSampling
from tests.kernels.conftest import ints
from tests.kernels.native import needs_native
from tests.kernels.speculative.test_lossless_runner import truth
from tests.kernels.speculative.test_steady_chains import ASKED, GREEDY, OPTIONS, drafting, guess_on, guessing

ADAPTIVE = {"adaptive": AdaptiveSettings(enabled=True)}


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "DFLASH", "STANDALONE", "NGRAM"])
def test_what_was_run_unseen_is_never_shown_and_guesses_after_a_few_steps_that_were_are_right(algorithm, drive):
    """Prompts and decodes, some of requests that are gone by then."""
    driver, rows = guessing(drive, algorithm, **ADAPTIVE)
    speculator, captured, shown, plain = driver.runner._speculator, driver.runner._captured, [], []
    see, run, reach = speculator.observer._see, captured.unseen_steady.run, captured.unseen_ends.run
    speculator.observer._see = lambda seen, *rest: shown.extend(seen.counts.tolist()) or see(seen, *rest)
    captured.unseen_steady.run = lambda: plain.append(len(captured.unseen_steady.slots)) or run()
    captured.unseen_ends.run = lambda batch: plain.append("ends") or reach(batch)
    asked = [ASKED[0], [token for _ in range(3) for token in ASKED[3]]]
    driver.admit(1, asked[0])
    driver.step([(1, driver.pending(1))], unseen=True)
    for _ in range(20):
        driver.step([(1, 1)], unseen=True)
    driver.admit(2, asked[1])
    driver.step([(1, 1), (2, 70)], unseen=True)  # a part of a prompt, which is left to others
    driver.step([(1, 1), (2, driver.pending(2))], unseen=True)
    driver.admit(3, ASKED[1])
    driver.step([(1, 1), (2, 1), (3, driver.pending(3))], unseen=True)
    driver.release(3)
    for _ in range(40):
        driver.step([(1, 1), (2, 1)], unseen=True)
    assert plain == ["ends"] + [1] * 20 + ["ends"] * 3 + [2] * 40
    assert speculator.observer.empty
    for _ in range(SHOWN):
        driver.step([(1, 1), (2, 1)])
    assert (shown, rows) == ([], [])
    accepted = guess_on(driver, 12)
    assert shown[:2] == [SHOWN, SHOWN]
    assert rows[-8:] == [2] * 8
    assert np.mean(accepted) > 1.2
    said = truth(drive, MODEL_DIR, asked, GREEDY[:2], 300, **OPTIONS)[0]
    for slot in (1, 2):
        assert driver.tokens[slot] == said[slot - 1][: len(driver.tokens[slot])]


def test_an_unseen_step_does_not_take_down_what_a_draft_would_be_made_from(drive):
    """Captured layers are not even brought together."""
    driver, _ = guessing(drive, "EAGLE3", **ADAPTIVE)
    target = driver.runner._captured.target
    driver.admit(1, ASKED[0])
    driver.step([(1, driver.pending(1))])
    driver.step([(1, 1)])
    before = target.features[:4].copy()
    for _ in range(3):
        driver.step([(1, 1)], unseen=True)
        assert (target.features[:4] == before).all()
    driver.step([(1, 1)])
    assert (target.features[:1] != before[:1]).any()


@pytest.mark.parametrize(("more", "passes"), [(ADAPTIVE, 2), ({}, 0)], ids=["adaptive", "always"])
def test_passes_without_captured_layers_are_prepared_where_steps_may_be_unseen(more, passes, drive, monkeypatch):
    """Of decodes, and of short prompts."""
    prepared, forward = [], Decoder.forward

    def spy(self, batch, caches, capture=True):
        prepared.append(capture)
        return forward(self, batch, caches, capture)

    monkeypatch.setattr(Decoder, "forward", spy)
    guessing(drive, "EAGLE3", **more)
    assert prepared.count(False) == passes


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(OPTIONS, marks=needs_native, id="native"),
        pytest.param(OPTIONS | {"dtype": "float32"}, id="general"),
    ],
)
@pytest.mark.parametrize("algorithm", ["EAGLE3", "NGRAM"])
def test_unseen_steps_may_begin_and_end_at_any_time(algorithm, options, drive):
    """Right behind guesses, prompts and each other; beside a request that is never to guess."""
    driver = drive(MODEL_DIR, speculation=drafting(algorithm, **ADAPTIVE), **options)
    never = msgspec.structs.replace(GREEDY[0], drafts=0)
    driver.admit(1, ASKED[0])
    driver.step([(1, driver.pending(1))])
    guesses = []
    for number in range(24):
        if number == 5:
            driver.admit(2, ASKED[1])
            driver.step([(1, 1), (2, driver.pending(2))], unseen=True)
        if number == 9:
            driver.admit(3, ASKED[2], sampling=never)
            driver.step([(1, 1), (2, 1), (3, driver.pending(3))])
        slots = [1, *([2] if number > 4 else []), *([3] if number > 8 else [])]
        for _ in range(number % 3):
            driver.step([(slot, 1) for slot in slots], unseen=True)
        for _ in range(number % 4):
            driver.step([(slot, 1) for slot in slots])
        result = driver.step([(slot, 1) for slot in slots], {slot: 4 for slot in slots if slot < 3})
        guesses.append(max(ints(result.drafted), default=0))
    assert any(guesses)
    said = truth(drive, MODEL_DIR, ASKED[:3], GREEDY[:3], 200, **options)[0]
    for slot in (1, 2, 3):
        assert driver.tokens[slot] == said[slot - 1][: len(driver.tokens[slot])]


def test_n_grams_know_what_was_run_unseen_once_they_are_shown_what_follows(drive):
    driver, _ = guessing(drive, "NGRAM", **ADAPTIVE)
    drafter = driver.runner._speculator.drafter
    driver.admit(1, ASKED[0])
    driver.step([(1, driver.pending(1))], unseen=True)
    for _ in range(30):
        driver.step([(1, 1)], unseen=True)
    told = drafter._told[1]
    driver.step([(1, 1)])
    assert drafter._told[1] == told == 1
    new, extend = [], drafter._trie.extend
    drafter._trie.extend = lambda sequence, tokens: new.append(tokens) or extend(sequence, tokens)
    known = list(driver.tokens[1])
    driver.step([(1, 1)], {1: 4})
    assert new[0] == known[1:]


def test_a_row_that_was_not_shown_says_the_same_beside_one_that_n_grams_guess_for(drive):
    """It sat out the steps that were."""
    driver, rows = guessing(drive, "NGRAM", **ADAPTIVE)
    said = truth(drive, MODEL_DIR, ASKED[:2], GREEDY[:2], 100, **OPTIONS)[0]
    driver.admit(3, said[0])
    driver.step([(3, driver.pending(3))])
    for slot in (1, 2):
        driver.admit(slot, ASKED[slot - 1])
        driver.step([(slot, driver.pending(slot))])
    for _ in range(6):
        driver.step([(1, 1), (2, 1)], unseen=True)
    driver.step([(1, 1)])
    driver.step([(1, 1)])
    result = driver.step([(1, 1), (2, 1)], {1: 4, 2: 4})
    assert rows == [2]
    assert ints(result.drafted)[0] > 0 == ints(result.drafted)[1]
    for slot in (1, 2):
        assert driver.tokens[slot] == said[slot - 1][: len(driver.tokens[slot])]


def test_what_a_draft_has_not_seen_yet_is_forgotten(drive):
    """Decodes that are kept, what was accepted last, and a prompt."""
    driver, _ = guessing(drive, "EAGLE", **ADAPTIVE)
    speculator = driver.runner._speculator
    driver.admit(1, ASKED[0])
    driver.step([(1, driver.pending(1))])
    assert speculator._reached is not None
    driver.step([(1, 1)], unseen=True)
    assert speculator._reached is None
    driver.step([(1, 1)])
    assert not speculator.observer.empty
    driver.step([(1, 1)], unseen=True)
    assert speculator.observer.empty
    for _ in range(2):
        driver.step([(1, 1)])
    driver.step([(1, 1)], {1: 4})
    assert speculator._chained is not None
    driver.step([(1, 1)], unseen=True)
    assert speculator._chained is None


def test_what_waits_to_be_seen_together_is_forgotten_where_a_device_would_keep_it(drive):
    driver = drive(MODEL_DIR, speculation=drafting("EAGLE", **ADAPTIVE), dtype="float32", page_size=16)
    speculator = driver.runner._speculator
    driver.admit(1, ASKED[0])
    driver.step([(1, driver.pending(1))])
    for _ in range(3):
        driver.step([(1, 1)])
    assert not speculator.observer.empty
    driver.step([(1, 1)], unseen=True)
    assert speculator.observer.empty
    assert speculator._last is None


def test_a_sampled_request_says_the_same_unseen(drive):
    driver, _ = guessing(drive, "EAGLE", **ADAPTIVE)
    sampling = SlotSampling(temperature=0.9, seed=4)
    for slot, unseen in ((1, False), (2, True)):
        driver.admit(slot, ASKED[1], sampling=sampling)
        driver.step([(slot, driver.pending(slot))], unseen=unseen)
        for _ in range(20):
            driver.step([(slot, 1)], unseen=unseen)
    assert driver.tokens[1] == driver.tokens[2]
