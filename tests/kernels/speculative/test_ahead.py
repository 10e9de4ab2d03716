"""Guesses made behind a step before the host knows what it accepted are those that would have been made after."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.platforms.cpu import CpuPlatform
from kernels.speculative.settings import SpeculativeSettings
from kernels.speculative.speculator import Speculator, _rows_of
from kernels.speculative.tree import chain
from kernels.step import SlotSampling
from tests.kernels.speculative.layouts import make_layout
from tests.kernels.speculative.test_drafts_in_a_runner import ASKED, LENGTH, drafts_of
from tests.kernels.speculative.test_lossless_runner import truth

GREEDY = [SlotSampling(temperature=0.0)] * 5
MIXED = [SlotSampling(temperature=0.0)] * 2 + [SlotSampling(temperature=0.9, seed=4)] * 1 + GREEDY[:2]


@pytest.fixture
def ready(monkeypatch):
    """The rows that found their guesses made, a list for each step."""
    found = []
    own = Speculator._ready

    def spy(self, slots, roots, limits):
        drafts = own(self, slots, roots, limits)
        if drafts is not None:
            found.append(len(slots))
        return drafts

    monkeypatch.setattr(Speculator, "_ready", spy)
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


def guessing(driver, said, samplings):
    """Three requests at a time, guessing all they can; what each step accepted, by request."""
    waiting, running, told = list(range(len(said))), {}, [[] for _ in said]
    while waiting or running:
        while waiting and len(running) < 3:
            number, slot = waiting.pop(0), next(slot for slot in (3, 1, 2) if slot not in running)
            running[slot] = number
            driver.admit(slot, ASKED[number], sampling=samplings[number])
            for _ in range(12):  # room for guesses behind guesses
                driver.pages[slot].append(driver.free.pop())
                driver._granted.append((slot, driver.pages[slot][-1]))
        rows = [(slot, driver.pending(slot)) for slot in running]
        result = driver.step(rows, {slot: driver.info.speculative_nodes - 1 for slot, count in rows if count == 1})
        assert not result.failed
        counts = np.frombuffer(result.accepted, np.int32).tolist()
        for (slot, count), accepted in zip(sorted(rows, key=lambda row: row[1] != 1), counts, strict=True):
            if count == 1:
                told[running[slot]].append(accepted)
        for slot, number in list(running.items()):
            if len(driver.tokens[slot]) >= LENGTH:
                assert driver.tokens[slot][:LENGTH] == said[number]
                driver.release(slot)
                del running[slot]
    return told


def test_rows_of_trees_are_picked():
    tree = chain(torch.arange(12).view(3, 4))
    assert _rows_of(tree, torch.tensor([2, 0])).tokens.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
