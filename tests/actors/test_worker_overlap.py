"""The next step is prepared while one runs."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.protocol import Step
from actors.worker import Worker
from kernels.answers import RunningStep
from kernels.step import StepBatch, StepResult


class Device:
    """A runner whose steps end when they are told to. ``done``: as on a CPU, where nothing is left to wait for."""

    def __init__(self, done: bool) -> None:
        self.done = done
        self.started: list[int] = []
        self.may_end = threading.Event()
        self.second = threading.Event()

    def start(self, batch: StepBatch) -> RunningStep:
        if batch.number == 13:
            raise RuntimeError("the device is lost")
        self.started.append(batch.number)
        if len(self.started) == 2:
            self.second.set()

        def finish() -> StepResult:
            assert self.done or self.may_end.wait(60)
            return StepResult(number=batch.number, accepted=b"", tokens=b"")

        return RunningStep(finish, self.done)


def worker_on(device: Any, monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setattr(Worker, "context", SimpleNamespace(incarnation=1), raising=False)
    worker = Worker(cast(Any, SimpleNamespace(faults="", runner=SimpleNamespace(tp_rank=0))))
    worker._epoch = 1
    worker._runner = device
    worker._thread, worker._waiting = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    return worker


def step(number: int) -> Step:
    return Step(epoch=1, batch=StepBatch(number=number, slots=b"", generations=b"", counts=b""))


async def test_a_step_is_prepared_while_another_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(done=False)
    worker = worker_on(device, monkeypatch)
    answers = [worker.step(step(number)) for number in (1, 2)]
    assert await asyncio.to_thread(device.second.wait, 60)
    assert device.started == [1, 2]
    assert not answers[0].done()
    device.may_end.set()
    assert [(await answer).number for answer in answers] == [1, 2]


async def test_a_step_tells_how_long_it_waited_for_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = worker_on(Device(done=True), monkeypatch)
    gate = threading.Event()
    assert worker._thread is not None
    worker._thread.submit(gate.wait, 60)
    answer = worker.step(step(1))
    begun = time.monotonic()
    await asyncio.sleep(0.05)
    waited = time.monotonic() - begun
    gate.set()
    assert (await answer).timing.queued >= waited


async def test_what_is_done_is_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = worker_on(Device(done=True), monkeypatch)
    assert (await worker.step(step(1))).number == 1
    with pytest.raises(RuntimeError, match="lost"):
        await worker.step(step(13))
