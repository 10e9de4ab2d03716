"""Drafting before the host knows the accepted tokens yields the same draft tokens as drafting after."""

from __future__ import annotations

import pytest
import torch

from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import SlotSampling
from kernels.core.tree import chain
from kernels.speculation.early_draft import EarlyDraftPasses, EarlyDrafts, OverlappedVerify, rows_of
from kernels.speculation.speculator import Speculator
from tests.kits.speculation.accepting import accepting
from tests.kits.speculation.early_drafts import GREEDY, captures, drafting
from tests.kits.speculation.layouts import make_layout
from tests.kits.speculation.lossless import truth
from tests.kits.speculation.runner_drafts import LENGTH, PROMPTS, drafts_of

MIXED = [SlotSampling(temperature=0.0)] * 2 + [SlotSampling(temperature=0.9, seed=4)] * 1 + GREEDY[:2]


@pytest.fixture
def ready(monkeypatch):
    """The rows that found their draft tokens made, a list for each step."""
    found = []
    own = EarlyDrafts.take_ready

    def spy(self, slots, roots, limits, levels):
        drafts = own(self, slots, roots, limits, levels)
        if drafts is not None:
            found.append(len(slots))
        return drafts

    monkeypatch.setattr(EarlyDrafts, "take_ready", spy)
    return found


@pytest.mark.parametrize(
    ("name", "topk", "nodes", "samplings"),
    [
        ("eagle", 3, 10, GREEDY),
        ("eagle3", 3, 10, GREEDY),
        ("eagle3", 3, 10, MIXED),
        ("eagle3", 1, 5, MIXED),
        ("mimo", 1, 5, GREEDY),
    ],
)
def test_the_same_is_drafted(name, topk, nodes, samplings, drive, tmp_path, monkeypatch, ready):
    _, algorithm, target, draft, _, _ = make_layout(name, tmp_path)
    settings = SpeculativeSettings(algorithm, str(draft or ""), num_steps=4, topk=topk, num_draft_tokens=nodes)
    outputs, _ = truth(drive, target, PROMPTS, samplings, LENGTH)
    later = drive(target, speculation=settings)
    expected = drafts_of(later)
    reported = drafting(later, outputs, samplings)
    assert not ready
    captures(monkeypatch)
    ahead = drive(target, speculation=settings)
    made = drafts_of(ahead)
    assert drafting(ahead, outputs, samplings) == reported
    assert ahead.runner._loaded.speculator.drafter.early_positions() > 0
    assert 0 < len(made) < len(expected)
    assert ready
    if samplings is GREEDY:
        assert len(made) < len(expected) // 2


UNLIKE = [GREEDY[0], SlotSampling(temperature=0.0, max_drafts=0), GREEDY[0], MIXED[2], GREEDY[0]]


@pytest.mark.parametrize(
    ("name", "topk", "nodes", "most", "forced", "samplings"),
    [
        ("eagle3", 3, 10, 3, 0, GREEDY),
        ("eagle3", 3, 10, 5, 3, GREEDY),
        ("eagle3", 3, 10, 5, 3, UNLIKE),
        ("eagle3", 1, 5, 3, 2, UNLIKE),
        ("mimo", 1, 5, 5, 0, GREEDY),
    ],
)
def test_drafts_after_a_pass_that_accepts(name, topk, nodes, most, forced, samplings, drive, tmp_path, monkeypatch):
    _, algorithm, target, draft, _, _ = make_layout(name, tmp_path)
    settings = SpeculativeSettings(
        algorithm, str(draft or ""), num_steps=4, topk=topk, num_draft_tokens=nodes, fixed_acceptance=forced
    )
    outputs = truth(drive, target, PROMPTS, samplings, LENGTH)[0] if not forced else None
    trees = verified_trees(monkeypatch)
    reported = drafting(drive(target, speculation=settings), outputs, samplings, most)
    expected = trees.copy()
    trees.clear()
    captures(monkeypatch)
    accepting(monkeypatch)
    behind, alone, follow, run = [], [], EarlyDraftPasses.run_after_pass, EarlyDraftPasses.run
    monkeypatch.setattr(EarlyDraftPasses, "run_after_pass", lambda *given: behind.append(given[2]) or follow(*given))
    monkeypatch.setattr(EarlyDraftPasses, "run", lambda *given: alone.append(len(given[1].roots)) or run(*given))
    assert drafting(drive(target, speculation=settings), outputs, samplings, most) == reported
    assert trees == expected
    assert set(alone) <= {5}  # more rows than there are such passes for
    if samplings is GREEDY:
        assert len(behind) >= 10
        assert len(alone) > 2 or most < 5


def verified_trees(monkeypatch):
    """What is verified from now on: what is known of each row, and its nodes and their parents."""
    found, draft, issue = [], Speculator.draft, OverlappedVerify.issue

    def seen(table, tree, slots, known, counts):
        return [
            (table[slot, :length].tolist(), tree.tokens[row, :count].tolist(), tree.parents[row, :count].tolist())
            for row, (slot, length, count) in enumerate(zip(slots, known, counts, strict=True))
        ]

    def spy(self, step, most, levels):
        step = draft(self, step, most, levels)
        if step.drafts is not None:
            slots, state = step.slots[step.verifying], self.slots
            found.extend(seen(state.tokens, step.drafts.tree, slots, state.known[slots], step.drafts.nodes))
        return step

    def spy_behind(self, batch):
        grown, trees = self._speculator.early_drafts._grown, []
        if grown is not None:
            slots, tree = grown.run.step.slots, grown.tree
            known = grown.run.step.starts + grown.run.outcome()[0][:, 0].abs().numpy() + 1
            trees = seen(self._slots.tokens, tree, slots, known, [tree.tokens.shape[1]] * len(slots))
        followed = issue(self, batch)
        found.extend(trees if followed is not None else ())
        return followed

    monkeypatch.setattr(Speculator, "draft", spy)
    monkeypatch.setattr(OverlappedVerify, "issue", spy_behind)
    return found


def test_rows_of_trees_are_picked():
    tree = chain(torch.arange(12).view(3, 4))
    assert rows_of(tree, torch.tensor([2, 0])).tokens.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
