"""The next step is prepared while one runs."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.protocol import Step
from actors.runtime import Later
from actors.worker import StaleStep, Worker
from kernels.answers import RunningStep
from kernels.step import StepBatch, StepResult


class Device:
    """A runner whose steps end when they are told to. ``done``: as on a CPU, where nothing is left to wait for."""

    def __init__(self, done: bool) -> None:
        self.done = done
        self.started: list[int] = []
        self.may_end = threading.Event()

    def start(self, batch: StepBatch) -> RunningStep:
        if batch.number == 13:
            raise RuntimeError("the device is lost")
        self.started.append(batch.number)

        def finish() -> StepResult:
            assert self.done or self.may_end.wait(60)
            return StepResult(number=batch.number, accepted=b"", tokens=b"")

        return RunningStep(finish, self.done)


def worker_on(device: Any, monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setattr(Worker, "context", SimpleNamespace(incarnation=1), raising=False)
    worker = Worker(cast(Any, SimpleNamespace(faults="", runner=SimpleNamespace(tp_rank=0))))
    worker._epoch = 1
    worker._runner = device
    worker._waiting = ThreadPoolExecutor(1)
    return worker


def step(number: int) -> Step:
    return Step(epoch=1, batch=StepBatch(number=number, slots=b"", generations=b"", counts=b""))


def test_a_step_is_prepared_while_another_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(done=False)
    worker = worker_on(device, monkeypatch)
    answers = [worker.step(step(number), 0.0) for number in (1, 2)]
    assert device.started == [1, 2]
    assert all(isinstance(answer, Later) for answer in answers)
    assert not any(answer.done() for answer in answers)
    device.may_end.set()
    assert [answer.result(60).number for answer in answers] == [1, 2]


def test_a_step_tells_how_long_it_waited_for_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = worker_on(Device(done=True), monkeypatch)
    answer = worker.step(step(1), time.monotonic() - 5.0)
    assert isinstance(answer, StepResult)
    assert answer.timing.queued >= 5.0


def test_what_is_done_is_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = worker_on(Device(done=True), monkeypatch)
    answer = worker.step(step(1), 0.0)
    assert isinstance(answer, StepResult)
    assert answer.number == 1
    with pytest.raises(RuntimeError, match="lost"):
        worker.step(step(13), 0.0)


def test_a_step_of_an_earlier_life_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = worker_on(Device(done=True), monkeypatch)
    worker._epoch = 2
    with pytest.raises(StaleStep, match="of life 1"):
        worker.step(step(1), 0.0)
