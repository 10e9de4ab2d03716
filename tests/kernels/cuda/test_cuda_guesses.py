"""Whole cycles of guesses by the GPU's platform and its kernels say what the CPU says without guesses."""

from __future__ import annotations

import pytest

from kernels.speculative.ahead import AheadPasses
from kernels.speculative.following import Following
from kernels.speculative.grown import GrownTrees
from kernels.speculative.settings import SpeculativeSettings
from kernels.step import SlotSampling
from tests.kernels.cuda.interpreted import install
from tests.kernels.speculative.layouts import make_layout
from tests.kernels.speculative.test_drafts_in_a_runner import ASKED
from tests.kernels.speculative.test_lossless_runner import truth

GREEDY = SlotSampling(temperature=0.0)
LENGTH = 24


@pytest.mark.parametrize(("name", "topk", "nodes"), [("eagle3", 3, 8), ("mimo", 1, 4)])
def test_cycles_are_lossless(name, topk, nodes, device, drive, tmp_path, monkeypatch):
    _, algorithm, target, draft, _, _ = make_layout(name, tmp_path)
    asked = ASKED[4], ASKED[0] * 3
    said, _ = truth(drive, target, asked, [GREEDY] * 2, LENGTH)
    if device.type == "cpu":
        install(monkeypatch)
    behind, accepted, early, follow, own, issue = [], [], [], AheadPasses.follow, GrownTrees.accepted, Following.issue
    monkeypatch.setattr(Following, "issue", lambda *given: early.append(issue(*given)) or early[-1])
    monkeypatch.setattr(AheadPasses, "follow", lambda *given: behind.append(given[2]) or follow(*given))
    monkeypatch.setattr(GrownTrees, "accepted", lambda *given: accepted.append(given[1].end) or own(*given))
    settings = SpeculativeSettings(algorithm, str(draft or ""), num_steps=3, topk=topk, num_draft_tokens=nodes)
    options = {"max_slots": 4, "max_step_tokens": 64, "graph_rows": (1, 2), "page_size": 16, "context_length": 64}
    driver, found = drive(target, device="cuda", speculation=settings, **options), {}
    for slot, prompt in enumerate(asked, 1):
        driver.admit(slot, prompt, sampling=GREEDY)
        for _ in range(4):  # room for guesses behind guesses
            driver.pages[slot].append(driver.free.pop())
            driver._granted.append((slot, driver.pages[slot][-1]))
    while len(found) < 2:
        rows = [(slot, driver.pending(slot)) for slot in (1, 2) if slot not in found]
        result = driver.step(rows, {slot: nodes - 1 for slot, count in rows if count == 1})
        assert not result.failed
        for slot, _ in rows:
            if len(driver.tokens[slot]) >= LENGTH:
                found[slot] = driver.tokens[slot][:LENGTH]
                driver.release(slot)
    assert [found[1], found[2]] == said
    assert set(accepted) == {1, 2}
    assert set(behind) == {1, 2}
    assert len([followed for followed in early if followed is not None]) > 3
