"""With draft tokens a runner says what it says without, token for token, whatever the draft tokens are."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import SlotSampling
from kernels.state import group_sizes
from tests.kits.driver import VOCAB
from tests.kits.families import WITH_STATES
from tests.kits.speculation.lossless import SAMPLINGS, truth
from tests.kits.speculation.oracles import Oracle, draft_with, run_mixed

RIGHT = {
    "right": lambda position: True,
    "wrong": lambda position: False,
    "mixed": lambda position: random.Random(position).random() < 0.6,
}
SHAPES = {"chain": (3, 1), "tree": (3, 4), "deep tree": (6, 3)}


@pytest.fixture
def speculating(drive, monkeypatch):
    """A driver of a runner with this drafter."""

    def make(path, drafter, settings=None, **options):
        settings = settings or SpeculativeSettings("STANDALONE", num_draft_tokens=drafter.max_nodes)
        draft_with(monkeypatch, drafter)
        return drive(path, speculation=settings, **options)

    return make


@pytest.fixture(scope="module")
def plain():
    """``truth`` of the prompts of the next test, found once."""
    found = {}

    def get(drive, path, batch, samplings):
        if path not in found:  # more than is asked for: draft tokens go beyond
            found[path] = truth(drive, path, batch, samplings, 72)
        return found[path]

    return get


@pytest.mark.parametrize("right", RIGHT)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_output_does_not_depend_on_drafts(right, shape, reference, drive, speculating, prompts, plain):
    path = reference("qwen3").path
    batch = prompts(5, 23, 1, 40, 17, 9)
    samplings = list(SAMPLINGS.values())
    outputs, expected = plain(drive, path, batch, samplings)
    drafter = Oracle(*SHAPES[shape], RIGHT[right], VOCAB, ragged=right == "mixed")
    driver = speculating(path, drafter)
    drafter.truths = outputs
    found, scores = run_mixed(driver, batch, samplings, outputs, 60)
    assert found == [tokens[:60] for tokens in outputs]
    ours = np.concatenate(scores[5])[: len(expected[5])]
    theirs = expected[5][: len(ours)]
    np.testing.assert_allclose(ours[~np.isnan(ours)], theirs[~np.isnan(ours)], atol=2e-5)
    assert (~np.isnan(ours)).sum() > 30
    levels = sum(drafter.accepted) / max(1, len(drafter.accepted))
    assert {"right": levels > 0.6, "wrong": levels < 0.2, "mixed": 0.1 < levels < 2}[right], levels


@pytest.mark.parametrize(
    ("name", "right"), [(name, "mixed") for name in WITH_STATES] + [("qwen3.5", "right"), ("qwen3.5", "wrong")]
)
def test_states_go_back_to_the_accepted_tokens(name, right, reference, drive, speculating, prompts, monkeypatch):
    """Pages of states end inside of draft tokens, and other prompts share steps with them."""
    monkeypatch.setattr(group_sizes, "snapshot_pages", lambda state_bytes, page_bytes: 1)
    path, batch = reference(name).path, prompts(5, 23, 1, 40, 17)
    samplings = [SAMPLINGS[kind] for kind in ("greedy", "sampled", "greedy", "penalized", "greedy")]
    outputs, _ = truth(drive, path, batch, samplings, 62)
    drafter = Oracle(5, 1, RIGHT[right], VOCAB, ragged=right == "mixed")
    driver = speculating(path, drafter, page_size=4)
    assert {group.page_tokens for group in driver.info.bounded_groups} == {4}
    drafter.truths = outputs
    found, _ = run_mixed(driver, batch, samplings, outputs, 50)
    assert found == [tokens[:50] for tokens in outputs]
    levels = sum(drafter.accepted) / max(1, len(drafter.accepted))
    assert {"right": levels > 1, "wrong": levels < 0.2, "mixed": 0.1 < levels < 3}[right], levels


@pytest.mark.parametrize("shape", SHAPES)
def test_benchmarks_fix_what_is_accepted(shape, reference, speculating, prompts):
    """Right or wrong, so that no draft has to be trained to measure what speculation costs."""
    (prompt,) = prompts(9)
    drafter = Oracle(*SHAPES[shape], RIGHT["wrong"], VOCAB)
    drafter.observe = lambda seen: drafter.seen.update({1: int(seen.starts[0] + seen.counts[0])})
    settings = SpeculativeSettings("STANDALONE", num_draft_tokens=drafter.max_nodes, fixed_acceptance=2.5)
    drafter.truths = [prompt + [1] * 100]
    driver = speculating(reference("qwen3").path, drafter, settings)
    driver.admit(1, prompt)
    driver.step([(1, 9)])
    drafter.draft = with_roots(drafter)
    accepted = [
        int(np.frombuffer(driver.step([(1, 1)], {1: drafter.max_nodes - 1}).accepted, np.int32)[0]) for _ in range(10)
    ]
    assert accepted == [2, 3] * 5


@pytest.mark.parametrize(
    ("temperature", "threshold", "share", "count"),
    [
        (0.7, "accept_threshold_single", 0.98, 2),
        (0.7, "accept_threshold_single", 1.02, 1),
        (0.7, "accept_threshold_acc", 0.98, 2),
        (0.0, "accept_threshold_single", 0.98, 1),  # greedy rows are exact
    ],
)
def test_a_wrong_draft_that_is_likely_enough_is_accepted_if_requested(
    temperature, threshold, share, count, reference, speculating, prompts
):
    """``share``: of the probability that the model gives the draft token at the request's temperature."""
    model, (prompt,) = reference("qwen3"), prompts(9)
    sampling = SlotSampling(temperature=temperature, seed=3)
    drafter = Oracle(1, 1, RIGHT["wrong"], VOCAB)
    drafter.observe = lambda seen: drafter.seen.update({1: int(seen.starts[0] + seen.counts[0])})
    drafter.truths = [prompt + [1] * 100]
    plain = speculating(model.path, drafter)
    plain.admit(1, prompt, sampling=sampling)
    plain.step([(1, 9)])
    logprobs = model.logprobs(plain.tokens[1])[-1]
    likely = float((logprobs / (temperature or 1.0)).softmax(-1)[2])  # of what the oracle says in place of 1
    settings = SpeculativeSettings("STANDALONE", num_draft_tokens=2, **{threshold: share * likely})
    drafter.draft = with_roots(drafter)
    driver = speculating(model.path, drafter, settings)
    driver.admit(1, prompt, sampling=sampling)
    driver.step([(1, 9)])
    assert driver.tokens[1] == plain.tokens[1]
    result = driver.step([(1, 1)], {1: 1})
    assert np.frombuffer(result.accepted, np.int32).tolist() == [count]
    assert (driver.tokens[1][10] == 2) == (count == 2)


def with_roots(drafter):
    """Let the oracle believe whatever token is the root."""
    draft = drafter.draft

    def unbelieving(rows):
        drafter.says[1][int(rows.roots[0])] = int(rows.root_tokens[0])
        return draft(rows)

    return unbelieving
