"""The contract of executors, one suite for all of them: whichever runs a step, its tokens are the same."""

from __future__ import annotations

import numpy as np
import pytest

from app.understudy import MODEL_DIR
from kernels.contract.speculation import SpeculativeSettings
from kernels.devices.capture import Capture
from kernels.devices.cpu.device import CpuDevice
from kernels.devices.prepared import CapturedPasses
from kernels.execution.executors.eager_pass import EagerPass
from tests.kits.executors import find_executor
from tests.kits.prepared_steps import drive_prepared
from tests.kits.speculation.accepting import accepting
from tests.kits.speculation.early_drafts import captures
from tests.kits.speculation.layouts import make_layout
from tests.kits.speculation.native_loops import OPTIONS, drafting

PROMPTS = [[300 + token % 7 for token in range(12)], [400 + token % 5 for token in range(9)]]
SMALL = [[5, 6, 7, 8] * 3, [9, 4, 3] * 3]


class CapturedDecodes(Capture):
    """Passes of decodes without a graph."""

    def native_pass(self, *given, **options):
        return None

    def decodes(self, request):
        return CapturedPasses((1, 2, 4), lambda batch: request.forward(batch) if len(batch.token_ids) < 5 else None)


def small(drive, monkeypatch, tmp_path, reference, **more):
    return drive(reference("qwen3").path, page_size=16, **more), SMALL, 0


def whole(drive, monkeypatch, tmp_path, reference, **more):
    options = {"page_size": 16, "max_step_tokens": 256, "dtype": "float32"} | more
    return drive_prepared(drive, monkeypatch, reference("qwen3").path, **options)[0], SMALL, 0


def captured(drive, monkeypatch, tmp_path, reference, **more):
    make = CpuDevice.__init__

    def init(self, *given, **options):
        make(self, *given, **options)
        self.capture = CapturedDecodes()

    monkeypatch.setattr(CpuDevice, "__init__", init)
    return small(drive, monkeypatch, tmp_path, reference, **more)


def host(drive, monkeypatch, tmp_path, reference, **more):
    return drive(MODEL_DIR, **OPTIONS, **more), PROMPTS, 0


def native_drafts(drive, monkeypatch, tmp_path, reference, **more):
    return drive(MODEL_DIR, speculation=drafting("NGRAM"), **OPTIONS, **more), PROMPTS, 4


def accepts(drive, monkeypatch, tmp_path, reference, **more):
    captures(monkeypatch)
    accepting(monkeypatch)
    _, algorithm, target, draft, _, _ = make_layout("eagle3", tmp_path)
    settings = SpeculativeSettings(algorithm, str(draft), num_steps=4, topk=3, num_draft_tokens=10)
    return drive(target, speculation=settings, page_size=16, **more), SMALL, 9


CASES = {
    "NativeDecode": host,
    "NativeChains": native_drafts,
    "NativePrefill": host,
    "NoRows": small,
    "WholeStep": whole,
    "CapturedPass": captured,
    "OverlappedVerifyPass": accepts,
    "VerifyPass": accepts,
    "EagerPass": small,
}


def watch(driver):
    """Which executor has taken each step from now on; of those that take none, that state is unchanged."""
    taken, slots = [], driver.runner._loaded.slots
    for executor in driver.runner._executors:

        def execute(step, executor=executor, run=executor.execute):
            prepared = step._prepared
            before = [np.copy(part) for part in (slots.known, slots.computed, slots.page_count, slots.active)]
            running = run(step)
            if running is not None:
                taken.append(type(executor).__name__)
            elif prepared == step._prepared and not driver.runner._loaded.speculator:
                after = (slots.known, slots.computed, slots.page_count, slots.active)
                assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
            return running

        executor.execute = execute
    return taken


def play(driver, prompts, drafts):
    """Two requests that begin apart, then decode together; one leaves, and a step has no rows."""
    driver.admit(1, prompts[0])
    driver.step([(1, driver.pending(1))])
    driver.admit(2, prompts[1])
    driver.step([(1, 1), (2, driver.pending(2))])
    for slot in (1, 2, 1, 2, 1, 2):  # room for whatever steps in flight accept
        driver.pages[slot].append(driver.free.pop())
        driver._granted.append((slot, driver.pages[slot][-1]))
    limits = {1: drafts, 2: drafts} if drafts else None
    while min(len(driver.tokens[slot]) - len(prompts[slot - 1]) for slot in (1, 2)) < 12:
        assert not driver.step([(1, 1), (2, 1)], limits).failed
    found = [driver.tokens[slot][: len(prompts[slot - 1]) + 12] for slot in (1, 2)]
    driver.release(1)
    driver.step([])
    return found


@pytest.fixture
def make(drive, monkeypatch, tmp_path, reference):
    """A driver of a case, its prompts, and how many draft tokens a step may verify of a row."""

    def driver(kind, **more):
        found = CASES[kind](drive, monkeypatch, tmp_path, reference, **more)
        if find_executor(found[0].runner, kind) is None:
            pytest.skip("this processor has no native operators, or they are not compiled yet")
        return found

    return driver


@pytest.mark.parametrize("kind", CASES)
def test_an_executor_takes_its_steps_and_tokens_are_the_eager_ones(kind, make):
    driver, prompts, drafts = make(kind)
    taken = watch(driver)
    found = play(driver, prompts, drafts)
    assert kind in taken
    driver.release(2)
    driver.runner._executors = tuple(
        executor for executor in driver.runner._executors if type(executor).__name__ in ("NoRows", "EagerPass")
    )
    del taken[:]
    assert play(driver, prompts, 0) == found
    assert set(taken) == {"NoRows", "EagerPass"}


@pytest.mark.parametrize("kind", CASES)
def test_a_device_error_in_an_executor_is_explained(kind, make, monkeypatch):
    driver, prompts, drafts = make(kind)
    device = driver.runner._device
    explained = RuntimeError("the device is gone: start again")
    monkeypatch.setattr(device, "explain", lambda error: explained if isinstance(error, MemoryError) else None)
    executor = find_executor(driver.runner, kind)

    def fail(step):
        raise MemoryError

    executor.execute = fail
    with pytest.raises(RuntimeError, match="start again"):
        play(driver, prompts, drafts)


def test_the_first_executor_that_takes_a_step_runs_it(make):
    driver, prompts, _ = make("EagerPass")
    calls = []

    class Refusing:
        def execute(self, step):
            calls.append("refused")

    class Unreached:
        def execute(self, step):
            raise AssertionError

    driver.runner._executors = (Refusing(), EagerPass(driver.runner._context), Unreached())
    driver.admit(1, prompts[0])
    assert not driver.step([(1, driver.pending(1))]).failed
    assert calls == ["refused"]
