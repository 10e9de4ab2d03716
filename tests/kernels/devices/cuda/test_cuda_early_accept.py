"""Whole cycles of draft tokens by the GPU's platform and its kernels say what the CPU says without draft tokens."""

from __future__ import annotations

import pytest

from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import SlotSampling
from kernels.speculation.early_draft import EarlyDraftPasses, EarlyDrafts, OverlappedVerify
from tests.kernels.devices.cuda.interpreted import install
from tests.kits.speculation.layouts import make_layout
from tests.kits.speculation.lossless import truth
from tests.kits.speculation.runner_drafts import PROMPTS

GREEDY = SlotSampling(temperature=0.0)
LENGTH = 24


@pytest.mark.parametrize(("name", "topk", "nodes"), [("eagle3", 3, 8), ("mimo", 1, 4)])
def test_cycles_are_lossless(name, topk, nodes, device, drive, tmp_path, monkeypatch):
    _, algorithm, target, draft, _, _ = make_layout(name, tmp_path)
    prompts = PROMPTS[4], PROMPTS[0] * 3
    expected, _ = truth(drive, target, prompts, [GREEDY] * 2, LENGTH)
    if device.type == "cpu":
        install(monkeypatch)
    behind, accepted, early = [], [], []
    follow, own, issue = EarlyDraftPasses.run_after_pass, EarlyDrafts.take_accepted, OverlappedVerify.issue
    monkeypatch.setattr(OverlappedVerify, "issue", lambda *given: early.append(issue(*given)) or early[-1])
    monkeypatch.setattr(EarlyDraftPasses, "run_after_pass", lambda *given: behind.append(given[2]) or follow(*given))
    monkeypatch.setattr(
        EarlyDrafts, "take_accepted", lambda *given: accepted.append(given[1].accept_size) or own(*given)
    )
    settings = SpeculativeSettings(algorithm, str(draft or ""), num_steps=3, topk=topk, num_draft_tokens=nodes)
    options = {"max_slots": 4, "max_step_tokens": 64, "graph_rows": (1, 2), "page_size": 16, "context_length": 64}
    driver, found = drive(target, device="cuda", speculation=settings, **options), {}
    for slot, prompt in enumerate(prompts, 1):
        driver.admit(slot, prompt, sampling=GREEDY)
        for _ in range(4):  # room for draft tokens behind draft tokens
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
    assert [found[1], found[2]] == expected
    assert set(accepted) == {1, 2}
    assert set(behind) == {1, 2}
    assert len([followed for followed in early if followed is not None]) > 3
