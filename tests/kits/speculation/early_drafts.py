"""Runners that draft before the host asks."""

from __future__ import annotations

import numpy as np

from kernels.contract.step import SlotSampling
from kernels.devices.cpu.capture import CpuCapture
from tests.kits.speculation.runner_drafts import LENGTH, PROMPTS

__all__ = [
    "GREEDY",
    "captures",
    "drafting",
]

GREEDY = [SlotSampling(temperature=0.0)] * 5


def captures(monkeypatch):
    """A platform that prepares passes without a gain."""

    def capture(self, run):
        run()
        return run

    monkeypatch.setattr(CpuCapture, "draft", capture)


def drafting(driver, expected, samplings, max_drafts=3):
    """Run several requests, three of them in each third step, with the maximum of draft tokens; returns the accepted
    numbers of each step, by request."""
    waiting, running, reported = list(range(len(PROMPTS))), {}, [[] for _ in PROMPTS]
    while waiting or running:
        while waiting and len(running) < max_drafts:
            number, slot = waiting.pop(0), next(slot for slot in (3, 1, 2, 5, 4) if slot not in running)
            running[slot] = number
            driver.admit(slot, PROMPTS[number], sampling=samplings[number])
            for _ in range(12):  # room for draft tokens after draft tokens
                driver.pages[slot].append(driver.free.pop())
                driver._granted.append((slot, driver.pages[slot][-1]))
        rows = [(slot, driver.pending(slot)) for slot in running][: max_drafts if driver.number % 3 else 3]
        result = driver.step(rows, {slot: driver.info.speculative_nodes - 1 for slot, count in rows if count == 1})
        assert not result.failed
        counts = np.frombuffer(result.accepted, np.int32).tolist()
        for (slot, count), accepted in zip(sorted(rows, key=lambda row: row[1] != 1), counts, strict=True):
            if count == 1:
                reported[running[slot]].append(accepted)
        for slot, number in list(running.items()):
            if len(driver.tokens[slot]) >= LENGTH:
                assert expected is None or driver.tokens[slot][:LENGTH] == expected[number]
                driver.release(slot)
                del running[slot]
    return reported
