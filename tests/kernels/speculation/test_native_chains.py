"""Host chains generate the same tokens as other executors, and decline steps that they do not support."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from app.understudy import MODEL_DIR
from kernels.contract.step import SlotSampling
from kernels.speculation import observe
from tests.kits.driver import ints
from tests.kits.executors import find_executor, remove_executor
from tests.kits.speculation.lossless import truth
from tests.kits.speculation.native_loops import GREEDY, OPTIONS, PROMPTS, draft_on, draft_rows
from tests.kits.speculation.oracles import run_mixed

_TOKENIZER = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
STORIES = [
    _TOKENIZER.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n").ids
    for text in (
        "Tell me a story about a fox.",
        "Write a short story about a dog.",
        "List 5 countries and their capitals.",
    )
]
"""Prompts whose answers the drafts in the box were trained on: many draft tokens are accepted, whatever the weights."""
MIXED = [
    SlotSampling(temperature=0.0),
    SlotSampling(temperature=0.6, top_p=0.95, seed=8),
    SlotSampling(temperature=1.0, top_k=20, min_p=0.01, seed=9),
    SlotSampling(temperature=0.8, seed=10),
]
LENGTH = 110


@pytest.fixture(scope="module")
def expected():
    return {}


@pytest.mark.parametrize("algorithm", ["DFLASH", "EAGLE", "EAGLE3", "MTP", "STANDALONE", "NGRAM"])
@pytest.mark.parametrize("sampling", [GREEDY, MIXED], ids=["greedy", "sampled"])
def test_chains_change_nothing(algorithm, sampling, drive, expected):
    ran, recorded, has_drafted = [], [], []
    driver, _ = draft_rows(drive, algorithm, ran)
    truths = expected.get(sampling[1])
    if truths is None:
        truths = expected[sampling[1]] = truth(drive, MODEL_DIR, PROMPTS, sampling, LENGTH + 20, **OPTIONS)[0]
    step = driver.step

    def watched(rows, drafts):
        result = step(rows, drafts)
        has_drafted.append(any(ints(result.drafted)) and all(count == 1 for _, count in rows))  # not beside prompts
        return result

    driver.step = watched
    found, _ = run_mixed(driver, PROMPTS, sampling, truths, LENGTH, reported=recorded)
    assert found == [tokens[:LENGTH] for tokens in truths]
    assert len(ran) > 0.7 * sum(has_drafted)  # others say the same
    assert min(ran) < max(ran)
    assert min(ran) == 1 or algorithm == "NGRAM"  # which may find nothing for the last row
    drafted, _ = np.array(recorded).T
    assert drafted.mean() > 0.5  # a draft that sees the wrong tokens drafts none


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE"])
def test_a_step_observes_the_accepted_tokens_of_the_last_one(algorithm, drive):
    """As if it were shown by itself, pages that come in between or not; behind the end of all, nothing waits."""
    accepted, shown, states = [], [], []
    for apart in (False, True):
        driver, _ = draft_rows(drive, algorithm)
        runner, count = driver.runner, len(shown)
        speculator, chains = runner._loaded.speculator, find_executor(runner, "NativeChains")._loop
        show, hosts = speculator.observer.show, chains._drafts.observe
        if apart:
            speculator.can_continue = lambda slots: False
        for slot in (1, 2):
            driver.admit(slot, STORIES[slot])
        driver.step([(1, driver.pending(1)), (2, driver.pending(2))])
        speculator.observer.show = lambda *seen, show=show: shown.append(seen) or show(*seen)
        speculator.flush_idle()
        accepted.append([])
        for _ in range(12):
            accepted[-1].append(ints(driver.step([(1, 1), (2, 1)], {1: 4, 2: 4}).accepted))
            speculator.flush_idle()
        assert len(shown) - count == (12 if apart else 1)
        driver.release(2)
        state, ended = runner._loaded.slots, []
        while ended != [2]:
            state._targets[1] = state.known[1] + 2
            ended = ints(driver.step([(1, 1)], {1: 4}).accepted)
        speculator.flush_idle()
        assert apart or len(shown) - count == 3
        assert hosts.__self__._reached[1] == state.known[1] - (algorithm != "STANDALONE")
        states.append(hosts.__self__._passes.states[1].clone())
    assert accepted[0] == accepted[1]
    assert np.mean(accepted) > 1.4
    assert torch.equal(*states)


def test_decodes_beside_prompts_draft_in_the_next_step(drive):
    driver, _ = draft_rows(drive, "EAGLE")
    assert driver.info.speculative_decode_only
    driver.admit(1, PROMPTS[0])
    driver.step([(1, driver.pending(1))])
    driver.admit(2, PROMPTS[1])
    driver.step([(1, 1), (2, driver.pending(2))])
    assert ints(driver.step([(1, 1), (2, 1)], {1: 3, 2: 3}).drafted) == [3, 3]
    expected = truth(drive, MODEL_DIR, PROMPTS[:2], GREEDY[:2], 60, **OPTIONS)[0]
    for slot in (1, 2):
        assert driver.tokens[slot] == expected[slot - 1][: len(driver.tokens[slot])]


@pytest.mark.parametrize("algorithm", ["DFLASH", "EAGLE3", "STANDALONE", "NGRAM"])
def test_steps_without_draft_tokens_run_plainly_and_are_observed_later(algorithm, drive, monkeypatch):
    """More of them than wait to be seen, for two requests that begin and pause apart; then draft tokens are right
    again."""
    monkeypatch.setattr(observe, "MAX_TOKENS", 64)
    driver, rows = draft_rows(drive, algorithm)
    decode, plain = find_executor(driver.runner, "NativeDecode"), []
    run = decode.advance
    decode.advance = lambda: plain.append(len(decode._slots)) or run()
    driver.admit(1, STORIES[0])
    driver.step([(1, driver.pending(1))])
    for _ in range(69):
        driver.step([(1, 1)])
    driver.admit(2, STORIES[1])
    driver.step([(1, 1), (2, driver.pending(2))])
    for _ in range(7):
        driver.step([(1, 1), (2, 1)])
    assert plain == [1] * 69 + [2] * 7
    assert not rows
    known = [list(driver.tokens[slot]) for slot in (1, 2)]
    accepted = draft_on(driver, 12)
    assert set(rows) == {2}
    assert len(rows) == 12 or algorithm == "NGRAM"  # which finds none now and then: then the step is a plain one
    expected = truth(drive, MODEL_DIR, STORIES[:2], GREEDY[:2], 300, **OPTIONS)[0]
    for slot in (1, 2):
        assert driver.tokens[slot] == expected[slot - 1][: len(driver.tokens[slot])]
        driver.release(slot)
    driver, _ = draft_rows(drive, algorithm)  # another one: n-grams remember what the first has said
    for slot, tokens in enumerate(known, 1):  # as if all of it were a prompt, which is seen at once
        driver.admit(slot, tokens[:-1])
        driver.step([(slot, driver.pending(slot))])
    at_once = draft_on(driver, 12)
    assert np.mean(at_once) > (1.2 if algorithm == "NGRAM" else 1.4)
    assert np.mean(accepted) > 1 + 0.8 * (np.mean(at_once) - 1)


def test_a_row_without_drafts_runs_among_others_that_have_some(drive):
    driver, rows = draft_rows(drive, "EAGLE")
    for slot in (1, 2):
        driver.admit(slot, PROMPTS[slot])
        driver.step([(slot, driver.pending(slot))])
    result = driver.step([(1, 1), (2, 1)], {2: 3})
    assert rows == [2]
    assert ints(result.drafted) == [0, 3]
    assert ints(result.accepted)[0] == 1


def ending(driver, **end):
    """The request that is admitted next ends so."""
    driver._admitted[-1] = msgspec.structs.replace(driver._admitted[-1], **end)


@pytest.mark.parametrize("algorithm", ["DFLASH", "NGRAM"])
def test_no_step_runs_after_the_end(algorithm, drive):
    driver, rows = draft_rows(drive, algorithm)
    prompt = PROMPTS[0]
    driver.admit(1, prompt)
    expected = driver.generate(1, len(prompt) + 12)[len(prompt) :]
    driver.release(1)
    plain, decode = [], find_executor(driver.runner, "NativeDecode")
    advance = decode._advance
    decode._advance = lambda *given: plain.append(1) or advance(*given)
    last = next(place for place in range(3, 12) if expected[place] not in expected[:place])

    driver.admit(1, prompt)
    ending(driver, stop_ids=(expected[last],))
    while expected[last] not in driver.tokens[1][len(prompt) :]:
        before = last + len(prompt) - len(driver.tokens[1])  # a plain step knows an end by the last token alone
        driver.step([(1, driver.pending(1))], {1: before} if before and driver.pending(1) == 1 else None)
    seen = len(rows)
    plain.clear()
    for drafts in ({1: 7}, None):
        result = driver.step([(1, 1)], drafts)
        assert ints(result.accepted) == [1]
        assert not result.failed
    assert len(rows) == seen
    assert not plain
    driver.release(1)

    driver.admit(1, prompt, sampling=SlotSampling(temperature=0.0, min_tokens=12, stop_ids=()))
    ending(driver, stop_ids=(expected[last],), target=len(prompt) + 12)
    drafted = []
    while len(driver.tokens[1]) < len(prompt) + 12:
        left = len(prompt) + 12 - len(driver.tokens[1])
        result = driver.step([(1, driver.pending(1))], {1: 7} if driver.pending(1) == 1 else None)
        drafted.append((ints(result.drafted) or [0])[0])
        if algorithm != "NGRAM":
            assert drafted[-1] < left
    assert driver.tokens[1][len(prompt) : len(prompt) + 12] == expected  # a stop token that comes early is none
    assert max(drafted) > 1
    seen = len(rows)
    driver.step([(1, 1)], {1: 7})
    assert len(rows) == seen


def test_a_row_at_its_end_drafts_no_more_beside_one_that_goes_on(drive):
    driver, _ = draft_rows(drive, "EAGLE")
    prompt = PROMPTS[0]
    driver.admit(1, prompt)
    expected = driver.generate(1, len(prompt) + 12)[len(prompt) :]
    driver.release(1)
    last = next(place for place in range(3, 12) if expected[place] not in expected[:place])
    driver.admit(1, prompt)
    ending(driver, stop_ids=(expected[last],))
    driver.admit(2, PROMPTS[1])
    driver.step([(1, driver.pending(1)), (2, driver.pending(2))])
    while expected[last] not in driver.tokens[1][len(prompt) :]:
        driver.step([(1, 1), (2, 1)], {1: 4, 2: 4})
    for _ in range(3):
        assert find_executor(driver.runner, "NativeChains")._loop.can_continue
        assert ints(driver.step([(1, 1), (2, 1)], {1: 4, 2: 4}).drafted) == [0, 4]


@pytest.mark.parametrize("algorithm", ["EAGLE", "DFLASH"])
def test_what_others_accepted_counts_for_where_a_sequence_ends(algorithm, drive):
    driver, _ = draft_rows(drive, algorithm)
    chains, state = find_executor(driver.runner, "NativeChains")._loop, driver.runner._loaded.slots
    run, accepted = chains.run, [1]
    driver.admit(1, PROMPTS[0])
    driver.step([(1, driver.pending(1))])
    driver.step([(1, 1)], {1: 4})
    while accepted == [1]:
        chains.run = lambda batch: None
        accepted = ints(driver.step([(1, 1)], {1: 4}).accepted)
        chains.run = run
        state._targets[1] = len(driver.tokens[1]) + 1
        result = driver.step([(1, 1)], {1: 4})
        assert (ints(result.accepted), ints(result.drafted)) == ([1], [])
        state._targets[1] += 100


def test_a_chain_of_drafts_ends_before_what_ends_its_sequence(drive):
    driver, rows = draft_rows(drive, "EAGLE")
    prompt, ends = PROMPTS[0], []
    driver.admit(1, prompt)
    expected = driver.generate(1, len(prompt) + 12)[len(prompt) :]
    driver.release(1)
    for place in (place for place in range(1, 12) if expected[place] not in expected[:place]):
        driver.admit(1, prompt)
        ending(driver, stop_ids=(4095, expected[place]))
        driver.step([(1, len(prompt))])
        while expected[place] not in driver.tokens[1][len(prompt) :]:
            result = driver.step([(1, 1)], {1: 7})
        assert result.depths == result.drafted  # what ended it was no wrong draft token
        ends.append(driver.tokens[1][len(prompt) :] == expected[: place + 1])
        driver.release(1)
    assert rows
    assert len(ends) > 3
    assert all(ends)
    driver.admit(1, prompt, sampling=SlotSampling(temperature=0.0, min_tokens=12, stop_ids=()))
    ending(driver, stop_ids=tuple(expected))  # too early to be one
    driver.step([(1, len(prompt))])
    assert max(ints(driver.step([(1, 1)], {1: 7}).drafted)[0] for _ in range(2)) == 7


def test_a_wrong_draft_token_that_ends_a_sequence_is_reported(drive):
    driver, _ = draft_rows(drive, "EAGLE")
    prompt, wrong = PROMPTS[0], []
    for first in range(0, 4096, 8):  # some of which the draft drafts
        driver.admit(1, prompt)
        ending(driver, stop_ids=tuple(range(first, first + 8)))
        driver.step([(1, len(prompt))])
        for _ in range(4):
            result = driver.step([(1, 1)], {1: 7})
            if ints(result.drafted) != ints(result.depths):
                wrong.append([ints(part)[0] for part in (result.accepted, result.drafted, result.depths)])
        driver.release(1)
        if any(drafted == 0 for _, drafted, _ in wrong):
            break
    assert [1, 0, 1] in wrong
    assert all(accepted == depth == drafted + 1 for accepted, drafted, depth in wrong)


@pytest.mark.parametrize("how", [{"logprobs": 0}, {"temperature": 0.7, "repetition_penalty": 1.2}])
def test_rows_whose_logits_are_edited_or_scored_are_not_theirs(how, drive):
    driver, rows = draft_rows(drive, "DFLASH")
    driver.admit(1, PROMPTS[0], sampling=SlotSampling(**{"temperature": 0.0} | how))
    driver.step([(1, driver.pending(1))])
    driver.step([(1, 1)], {1: 4})
    assert not rows
    driver.release(1)
    driver.admit(1, PROMPTS[0])
    driver.step([(1, driver.pending(1))])
    driver.step([(1, 1)], {1: 4})
    driver.step([(1, 1)])  # a row without draft tokens
    assert rows == [1]


def test_a_row_that_is_not_finite_is_left_to_others(drive):
    ran = []
    driver, rows = draft_rows(drive, "DFLASH", ran)
    driver.admit(1, PROMPTS[1])
    driver.step([(1, driver.pending(1))])
    driver.step([(1, 1)], {1: 4})
    with torch.inference_mode():
        driver.runner._loaded.caches[0][driver.pages[1][0]] = float("nan")
    result = driver.step([(1, 1)], {1: 4})
    assert (rows, ran) == ([1, 1], [1])
    assert [error.slot for error in result.failed] == [1]


def test_a_step_without_draft_tokens_reports_its_observation_time(drive):
    driver, _ = draft_rows(drive, "EAGLE")
    driver.admit(1, PROMPTS[0])
    driver.step([(1, driver.pending(1))])
    driver.step([(1, 1)], {1: 4})
    timings = [driver.step([(1, 1)]).timing for _ in range(3)]
    assert 0 < timings[0].observe < timings[0].total
    assert [timing.observe for timing in timings[1:]] == [0, 0]


@pytest.mark.parametrize("sampling", [GREEDY, MIXED], ids=["greedy", "sampled"])
def test_prompts_run_to_their_ends_in_one_call_and_are_observed_when_idle(sampling, drive, expected):
    """Alone, together and beside decodes; long ones, and those whose scores are wanted, are left to others."""
    driver, _ = draft_rows(drive, "EAGLE3")
    ends, speculator = find_executor(driver.runner, "NativePrefill"), driver.runner._loaded.speculator
    ran, shown = [], []
    run, show = ends.run, speculator.observer.show

    def spy(batch):
        found = run(batch)
        if found is not None:
            ran.append(len(found.slots))
        return found

    ends.run = spy
    speculator.observer.show = lambda seen, *rest: shown.append(seen.counts.tolist()) or show(seen, *rest)
    truths = expected.get(sampling[1])
    if truths is None:
        truths = expected[sampling[1]] = truth(drive, MODEL_DIR, PROMPTS, sampling, LENGTH + 20, **OPTIONS)[0]
    for slot in (1, 2):
        driver.admit(slot, PROMPTS[slot - 1], sampling=sampling[slot - 1])
    driver.step([(1, 5), (2, 23)])
    assert (ran, shown) == ([2], [])
    speculator.flush_idle()
    assert shown == [[5, 23]]
    driver.admit(3, PROMPTS[2], sampling=sampling[2])
    driver.step([(1, 1), (2, 1), (3, 10)])  # not to its end
    driver.step([(1, 1), (2, 1), (3, 7)])
    assert ran == [2, 3]
    driver.admit(4, PROMPTS[3], sampling=msgspec.structs.replace(sampling[3], prompt_logprobs=0))
    driver.step([(4, 40)])
    driver.admit(5, PROMPTS[3] + truths[3][40:60])
    driver.step([(5, 60)])
    driver.admit(6, PROMPTS[3], sampling=SlotSampling(temperature=0.0, frequency_penalty=0.5))
    driver.step([(6, 40)])
    assert ran == [2, 3]
    for slot in (1, 2, 3, 4):
        assert driver.tokens[slot] == truths[slot - 1][: len(driver.tokens[slot])]
    remove_executor(driver.runner, "NativePrefill")
    for slot in (7, 8):
        driver.admit(slot, PROMPTS[slot - 7], sampling=sampling[slot - 7])
        driver.step([(slot, driver.pending(slot))])
        assert driver.tokens[slot] == driver.tokens[slot - 6][: len(driver.tokens[slot])]


def test_after_the_end_of_all_sequences_no_step_drafts(drive):
    """Whether the step is like the one before, or somebody left in it."""
    driver, rows = draft_rows(drive, "EAGLE")
    for slot in (1, 2):
        driver.admit(slot, PROMPTS[slot])
    driver.step([(1, driver.pending(1)), (2, driver.pending(2))])
    state, chains = driver.runner._loaded.slots, find_executor(driver.runner, "NativeChains")._loop
    state._targets[1] = state.known[1] + 2
    while state.known[1] < state._targets[1]:
        driver.step([(1, 1)], {1: 4})
    rows.clear()
    calls = []
    chains.run = calls.append
    driver.step([(1, 1)], {1: 4})
    driver.release(2)
    driver.step([(1, 1)], {1: 4})
    assert (rows, calls) == ([], [])


def test_n_grams_observe_steps_without_draft_tokens_when_idle(drive):
    answers = truth(drive, MODEL_DIR, PROMPTS, GREEDY, 41, **OPTIONS)[0]
    prompt = next(prompt for prompt, answer in zip(PROMPTS, answers, strict=True) if answer[len(prompt)] not in prompt)
    driver, rows = draft_rows(drive, "NGRAM")
    speculator = driver.runner._loaded.speculator
    driver.admit(1, prompt)
    driver.step([(1, len(prompt))])
    driver.step([(1, 1)], {1: 4})
    speculator.flush_idle()
    assert not rows
    assert speculator.drafter._extended[1] == len(driver.tokens[1])


def test_a_prompt_that_is_not_finite_is_left_to_others(drive):
    driver, _ = draft_rows(drive, "EAGLE3")
    driver.admit(1, PROMPTS[1])
    driver.step([(1, 10)])
    with torch.inference_mode():
        driver.runner._loaded.caches[0][driver.pages[1][0]] = float("nan")
    driver.admit(2, PROMPTS[0])
    result = driver.step([(1, 13), (2, 5)])
    assert [error.slot for error in result.failed] == [1]
    assert ints(result.accepted) == [0, 1]
    assert driver.runner._loaded.speculator._prompts is None
