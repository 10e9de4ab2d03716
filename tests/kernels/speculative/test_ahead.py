"""Guesses made behind a step before the host knows what it accepted are those that would have been made after."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.platforms.cpu import CpuPlatform
from kernels.speculative.ahead import AheadPasses
from kernels.speculative.following import Following
from kernels.speculative.grown import GrownTrees, rows_of
from kernels.speculative.settings import SpeculativeSettings
from kernels.speculative.speculator import Speculator
from kernels.speculative.tree import chain
from kernels.step import SlotSampling
from tests.kernels.speculative.accepting import accepting
from tests.kernels.speculative.layouts import make_layout
from tests.kernels.speculative.test_drafts_in_a_runner import ASKED, LENGTH, drafts_of
from tests.kernels.speculative.test_lossless_runner import truth

GREEDY = [SlotSampling(temperature=0.0)] * 5
MIXED = [SlotSampling(temperature=0.0)] * 2 + [SlotSampling(temperature=0.9, seed=4)] * 1 + GREEDY[:2]


@pytest.fixture
def ready(monkeypatch):
    """The rows that found their guesses made, a list for each step."""
    found = []
    own = GrownTrees.ready

    def spy(self, slots, roots, limits, levels):
        drafts = own(self, slots, roots, limits, levels)
        if drafts is not None:
            found.append(len(slots))
        return drafts

    monkeypatch.setattr(GrownTrees, "ready", spy)
    return found


def captures(monkeypatch):
    """A platform that prepares passes, though it gains nothing by it."""

    def capture(self, run):
        run()
        return run

    monkeypatch.setattr(CpuPlatform, "capture_guesses", capture)


@pytest.mark.parametrize("samplings", [GREEDY, MIXED], ids=["greedy", "mixed"])
@pytest.mark.parametrize(
    ("name", "topk", "nodes"), [("eagle", 3, 10), ("eagle3", 3, 10), ("eagle3", 1, 5), ("mimo", 1, 5)]
)
def test_the_same_is_drafted(name, topk, nodes, samplings, drive, tmp_path, monkeypatch, ready):
    _, algorithm, target, draft, _, _ = make_layout(name, tmp_path)
    settings = SpeculativeSettings(algorithm, str(draft or ""), num_steps=4, topk=topk, num_draft_tokens=nodes)
    said, _ = truth(drive, target, ASKED, samplings, LENGTH)
    later = drive(target, speculation=settings)
    expected = drafts_of(later)
    told = guessing(later, said, samplings)
    assert not ready
    captures(monkeypatch)
    ahead = drive(target, speculation=settings)
    made = drafts_of(ahead)
    assert guessing(ahead, said, samplings) == told
    assert ahead.runner._speculator.drafter.reach() > 0
    assert 0 < len(made) < len(expected)
    assert ready
    if samplings is GREEDY:
        assert len(made) < len(expected) // 2


UNLIKE = [GREEDY[0], SlotSampling(temperature=0.0, drafts=0), GREEDY[0], MIXED[2], GREEDY[0]]


@pytest.mark.parametrize("samplings", [GREEDY, UNLIKE], ids=["greedy", "unlike"])
@pytest.mark.parametrize(
    ("name", "topk", "nodes", "most", "forced"),
    [("eagle3", 3, 10, 3, 0), ("eagle3", 3, 10, 5, 3), ("eagle3", 1, 5, 3, 2), ("mimo", 1, 5, 5, 0)],
)
def test_what_is_drafted_behind_a_pass_that_accepts(
    name, topk, nodes, most, forced, samplings, drive, tmp_path, monkeypatch
):
    _, algorithm, target, draft, _, _ = make_layout(name, tmp_path)
    settings = SpeculativeSettings(
        algorithm, str(draft or ""), num_steps=4, topk=topk, num_draft_tokens=nodes, fixed_acceptance=forced
    )
    said = truth(drive, target, ASKED, samplings, LENGTH)[0] if not forced else None
    trees = verified_trees(monkeypatch)
    told = guessing(drive(target, speculation=settings), said, samplings, most)
    expected = trees.copy()
    trees.clear()
    captures(monkeypatch)
    accepting(monkeypatch)
    behind, alone, follow, run = [], [], AheadPasses.follow, AheadPasses.run
    monkeypatch.setattr(AheadPasses, "follow", lambda *given: behind.append(given[2]) or follow(*given))
    monkeypatch.setattr(AheadPasses, "run", lambda *given: alone.append(len(given[1])) or run(*given))
    assert guessing(drive(target, speculation=settings), said, samplings, most) == told
    assert trees == expected
    assert set(alone) <= {5}  # more rows than there are such passes for
    if samplings is GREEDY:
        assert len(behind) >= 10
        assert len(alone) > 5 or most < 5


def verified_trees(monkeypatch):
    """What is verified from now on: what is known of each row, and its nodes and their parents."""
    found, draft, issue = [], Speculator.draft, Following.issue

    def seen(table, tree, slots, known, counts):
        return [
            (table[slot, :length].tolist(), tree.tokens[row, :count].tolist(), tree.parents[row, :count].tolist())
            for row, (slot, length, count) in enumerate(zip(slots, known, counts, strict=True))
        ]

    def spy(self, step, most, levels):
        step = draft(self, step, most, levels)
        if step.drafts is not None:
            slots, state = step.slots[step.verifying], self._slots
            found.extend(seen(state.tokens, step.drafts.tree, slots, state.known[slots], step.drafts.nodes))
        return step

    def spy_behind(self, batch):
        grown, trees = self._speculator.trees._grown, []
        if grown is not None:
            slots, tree = grown.run.step.slots, grown.tree
            known = grown.run.step.starts + grown.run.outcome()[0][:, 0].abs().numpy() + 1
            trees = seen(self._slots.tokens, tree, slots, known, [tree.tokens.shape[1]] * len(slots))
        followed = issue(self, batch)
        found.extend(trees if followed is not None else ())
        return followed

    monkeypatch.setattr(Speculator, "draft", spy)
    monkeypatch.setattr(Following, "issue", spy_behind)
    return found


def guessing(driver, said, samplings, most=3):
    """So many requests at a time, three of them in each third step, guessing all they can; what each step accepted, by
    request."""
    waiting, running, told = list(range(len(ASKED))), {}, [[] for _ in ASKED]
    while waiting or running:
        while waiting and len(running) < most:
            number, slot = waiting.pop(0), next(slot for slot in (3, 1, 2, 5, 4) if slot not in running)
            running[slot] = number
            driver.admit(slot, ASKED[number], sampling=samplings[number])
            for _ in range(12):  # room for guesses behind guesses
                driver.pages[slot].append(driver.free.pop())
                driver._granted.append((slot, driver.pages[slot][-1]))
        rows = [(slot, driver.pending(slot)) for slot in running][: most if driver.number % 3 else 3]
        result = driver.step(rows, {slot: driver.info.speculative_nodes - 1 for slot, count in rows if count == 1})
        assert not result.failed
        counts = np.frombuffer(result.accepted, np.int32).tolist()
        for (slot, count), accepted in zip(sorted(rows, key=lambda row: row[1] != 1), counts, strict=True):
            if count == 1:
                told[running[slot]].append(accepted)
        for slot, number in list(running.items()):
            if len(driver.tokens[slot]) >= LENGTH:
                assert said is None or driver.tokens[slot][:LENGTH] == said[number]
                driver.release(slot)
                del running[slot]
    return told


def test_rows_of_trees_are_picked():
    tree = chain(torch.arange(12).view(3, 4))
    assert rows_of(tree, torch.tensor([2, 0])).tokens.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
