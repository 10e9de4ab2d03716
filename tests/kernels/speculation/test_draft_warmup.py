"""Warm-up steps with draft tokens: they draft, and leave no state behind."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.contract.runner import RunningStep
from kernels.contract.speculation import SpeculativeSettings
from kernels.speculation.warmup import warm_up_drafts
from tests.kits.driver import ints
from tests.kits.speculation.layouts import make_layout
from tests.kits.speculation.lossless import truth
from tests.kits.speculation.oracles import run_mixed
from tests.kits.speculation.runner_drafts import PROMPTS, SAMPLINGS

LENGTH = 50


def warm_up(driver, slots, tokens):
    """-> of each step its counts, and the draft tokens that its rows verified."""
    seen = []

    def start(batch):
        running = driver.runner.start(batch)

        def finish():
            result = running.result()
            assert not result.failed
            seen.append((ints(batch.counts), ints(result.drafted)))
            return result

        return RunningStep(finish, running.done)

    warm_up_drafts(start, driver.info, driver.runner._loaded.speculator.drafter, slots, tokens)
    return seen


@pytest.mark.parametrize("algorithm", ["EAGLE3", "NGRAM"])
def test_warm_up_drafts_leave_nothing_behind(algorithm, drive, tmp_path):
    _, _, target, draft, _, _ = make_layout("eagle3", tmp_path)
    path = "" if algorithm == "NGRAM" else str(draft)
    settings = SpeculativeSettings(algorithm, path, num_steps=2, topk=1, num_draft_tokens=3)
    expected, _ = truth(drive, target, PROMPTS, SAMPLINGS, LENGTH)
    driver = drive(target, speculation=settings)
    seen = warm_up(driver, 17, 256)
    assert {len(drafted) for _, drafted in seen if drafted and min(drafted) == 2} >= {1, 2, 4, 8, 16}
    assert {max(drafted) for counts, drafted in seen if drafted and max(counts) > 1} == {1, 2}  # beside a prompt
    assert any(drafted and min(drafted) == 0 for counts, drafted in seen if max(counts, default=0) == 1)
    longest = max(max(counts, default=0) for counts, _ in seen)
    assert 64 < longest <= 256
    state = driver.runner._loaded.slots
    assert not state.active.any()
    assert not state.page_count.any()
    assert run_mixed(driver, PROMPTS, SAMPLINGS, expected, LENGTH)[0] == expected


def test_warm_up_drafts_have_pages_for_states(drive, reference, prompts):
    settings = SpeculativeSettings("NGRAM", num_draft_tokens=4)
    driver, model = drive(reference("qwen3.5").path, speculation=settings), reference("qwen3.5")
    seen = warm_up(driver, 17, 256)
    assert {len(drafted) for _, drafted in seen if drafted and min(drafted) == 3} >= {1, 2, 4, 8}
    (text,) = prompts(20)
    driver.admit(1, text)
    assert driver.generate(1, 40) == model.greedy(text, 40)


@pytest.mark.parametrize(("slots", "tokens", "rows"), [(2, 2048, {0, 1}), (17, 64, {0, 1, 2, 3, 4}), (17, 2, {0})])
def test_there_is_room_for_them(slots, tokens, rows, drive, tmp_path):
    _, _, target, draft, _, _ = make_layout("eagle3", tmp_path)
    settings = SpeculativeSettings("EAGLE3", str(draft), num_steps=2, topk=1, num_draft_tokens=3)
    driver = drive(target, speculation=settings, max_slots=slots, max_step_tokens=tokens)
    seen = warm_up(driver, slots, tokens)
    assert {len(counts) for counts, _ in seen} == rows
    assert max(sum(counts) for counts, _ in seen) <= tokens


def test_without_pages_for_a_request_there_are_no_steps(drive, tmp_path):
    _, _, target, draft, _, _ = make_layout("eagle3", tmp_path)
    settings = SpeculativeSettings("EAGLE3", str(draft), num_steps=2, topk=1, num_draft_tokens=3)
    driver = drive(target, speculation=settings, max_total_tokens=16)
    assert not [counts for counts, _ in warm_up(driver, 17, 2048) if counts]
    assert not np.any(driver.runner._loaded.slots.active)
