"""The next step is prepared while one runs."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from actors.protocol import CompileGrammar, LoadAdapter, NumberedAdapter, Step, UnloadAdapter, WorkerConfig
from actors.runtime import EarlyReply, Later
from actors.workers.worker import StaleStep, Worker
from kernels.contract.config import RunnerConfig
from kernels.contract.errors import ConfigError
from kernels.contract.grammar import Grammar
from kernels.contract.runner import RunningStep
from kernels.contract.step import StepBatch, StepResult, StepTiming


class Device:
    """A runner whose steps end when the test ends them. ``done``: as on a CPU, where nothing is left to wait for.
    ``drafted`` and ``rest``: what each has drafted, and leaves to do; ``whole``: what it tells of its time, and
    ``runs`` is called while it runs."""

    def __init__(
        self,
        done: bool,
        drafted: bytes = b"",
        rest: Callable[[], None] | None = None,
        whole: float = 0.0,
        runs: Callable[[], None] | None = None,
    ) -> None:
        self.runs = runs
        self.done, self.drafted, self.rest, self.timing = done, drafted, rest, StepTiming(total=whole)
        self.started: list[int] = []
        self.may_end = threading.Event()

    def start(self, batch: StepBatch) -> RunningStep:
        if batch.number == 13:
            raise RuntimeError("the device is lost")
        self.started.append(batch.number)

        def finish() -> StepResult:
            assert self.done or self.may_end.wait(60)
            if self.runs is not None:
                self.runs()
            return StepResult(number=batch.number, accepted=b"", tokens=b"", drafted=self.drafted, timing=self.timing)

        return RunningStep(finish, self.done, self.rest)


def worker_on(device: Any, monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setattr(Worker, "context", SimpleNamespace(incarnation=1), raising=False)
    worker = Worker(WorkerConfig(RunnerConfig("")))
    worker._epoch = 1
    worker._runner = device
    worker._load_ended.set()
    worker._result_thread = ThreadPoolExecutor(1)
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


def test_a_step_reports_how_long_it_waited_for_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(("drafted", "whole"), [(b"", 1.0), (b"\x02\0\0\0", 1.0), (b"\x02\0\0\0", 0.0)])
def test_work_after_a_steps_reply_counts_as_draft_cost(
    drafted: bytes, whole: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as the next step, sent meanwhile or before, waits for it; once. What runs nothing takes no time."""
    clock = [10.0]

    def passes(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr("actors.workers.worker.time", SimpleNamespace(monotonic=lambda: clock[0]))
    for sent, waited in ((-1.0, 2.0), (1.5, 0.5), (3.0, 0.0)):
        device = Device(True, drafted, lambda: passes(2.0), whole, lambda: passes(1.0))
        worker = worker_on(device, monkeypatch)
        first = worker.step(step(1), clock[0])
        assert isinstance(first, EarlyReply)
        begun = clock[0]
        first.then()
        assert clock[0] == begun + 2.0
        clock[0] = max(clock[0], begun + sent)
        answer = worker.step(step(2), begun + sent)
        assert isinstance(answer, EarlyReply)
        assert answer.answer.timing.total == (1.0 + waited if whole else 0.0)
        assert answer.answer.timing.observe == (waited if drafted and whole else 0.0)


def test_idle_work_of_suspects_comes_before_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    worker = worker_on(Device(True, rest=lambda: done.append(1)), monkeypatch)
    answer = worker.step(msgspec.structs.replace(step(1), idle_work_first=True), 0.0)
    assert isinstance(answer, StepResult)
    assert done == [1]


def test_a_step_takes_what_it_keeps_others_from_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the answer before it, if it was there by then: also what is around the model."""
    clock = [10.0]
    monkeypatch.setattr("actors.workers.worker.time", SimpleNamespace(monotonic=lambda: clock[0]))
    worker = worker_on(Device(True, whole=0.5), monkeypatch)
    worker.step(step(1), 9.0)
    reported = []
    for sent, now in ((9.5, 12.0), (13.0, 14.0), (12.5, 15.0)):
        clock[0] = now
        answer = worker.step(step(2), sent)
        assert isinstance(answer, StepResult)
        reported.append(answer.timing.total)
    assert reported == [2.0, 1.0, 1.0]


def test_a_step_of_an_earlier_incarnation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = worker_on(Device(done=True), monkeypatch)
    worker._epoch = 2
    with pytest.raises(StaleStep, match="of epoch 1"):
        worker.step(step(1), 0.0)


@pytest.mark.parametrize(
    ("begun", "answer"), [(True, "it takes more than 0 s to compile; simplify it"), (False, "busy")]
)
async def test_a_grammar_that_never_began_to_compile_is_not_at_fault(
    begun: bool, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: Future[object] = Future()
    if begun:
        compiled.set_running_or_notify_cancel()
    worker = worker_on(SimpleNamespace(compile_grammar=lambda _: compiled), monkeypatch)
    found = worker.compile_grammar(CompileGrammar(grammar=Grammar("regex", "a"), timeout=0.0))
    assert isinstance(found, asyncio.Future)
    assert await found == answer


async def test_a_grammar_is_compiled_while_a_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: Future[object] = Future()
    worker = worker_on(SimpleNamespace(compile_grammar=lambda _: compiled), monkeypatch)
    assert not hasattr(Worker.compile_grammar, "__in_thread__")  # steps have that thread
    found = worker.compile_grammar(CompileGrammar(grammar=Grammar("regex", "a"), timeout=60.0))
    assert isinstance(found, asyncio.Future)
    threading.Thread(target=compiled.set_exception, args=(ValueError("no"),)).start()
    assert await found == "no"


async def test_an_adapter_is_read_while_a_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, names = threading.Event(), []

    def load_adapter(index: int, path: str) -> None:
        assert may_end.wait(60)
        names.append(threading.current_thread().name)

    worker = worker_on(SimpleNamespace(load_adapter=load_adapter), monkeypatch)
    worker._adapter_thread = ThreadPoolExecutor(1, thread_name_prefix="reader")
    assert not hasattr(Worker.load_adapter, "__in_thread__")  # steps have that thread
    answer = worker.load_adapter(LoadAdapter(NumberedAdapter(1, "one", "path")))
    assert isinstance(answer, asyncio.Future)
    assert not answer.done()
    may_end.set()
    assert await answer == ""
    assert names == ["reader_0"]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux alone")
async def test_steps_have_priority_over_reading_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    priorities = []

    def load_adapter(index: int, path: str) -> None:
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    worker = worker_on(SimpleNamespace(load_adapter=load_adapter), monkeypatch)
    await worker.started()
    answer = worker.load_adapter(LoadAdapter(NumberedAdapter(1, "one", "path")))
    assert isinstance(answer, asyncio.Future)
    assert await answer == ""
    assert priorities == [19]
    assert os.getpriority(os.PRIO_PROCESS, 0) < 19
    assert worker._adapter_thread is not None
    worker._adapter_thread.shutdown()


@pytest.mark.parametrize("error", [ConfigError("its rank is 9"), KeyError("lora_alpha"), MemoryError()], ids=repr)
async def test_an_adapter_that_cannot_be_loaded_ends_no_worker(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def load_adapter(index: int, path: str) -> None:
        if index == 1:
            raise error

    worker = worker_on(SimpleNamespace(load_adapter=load_adapter), monkeypatch)
    first, second = (NumberedAdapter(index, f"adapter {index}", "path") for index in (1, 2))
    worker._adapter_thread = ThreadPoolExecutor(1)
    answers = [worker.load_adapter(LoadAdapter(each)) for each in (first, second)]
    found = [await answer for answer in answers if isinstance(answer, asyncio.Future)]
    assert str(error) in found[0]
    assert found[1:] == [""]
    worker._adapters.clear()
    worker._load_adapters((first, second), strict=False)
    assert worker._adapters == {2}


async def test_an_adapter_asked_for_while_the_model_loads_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[int] = []
    worker = worker_on(SimpleNamespace(load_adapter=lambda index, path: read.append(index)), monkeypatch)
    worker._epoch = None  # the Load that is under way names no adapter
    worker._load_ended.clear()
    worker._adapter_thread = ThreadPoolExecutor(1)
    answer = worker.load_adapter(LoadAdapter(NumberedAdapter(1, "one", "path")))
    assert isinstance(answer, asyncio.Future)
    await asyncio.sleep(0)
    assert not answer.done()
    worker._epoch = 2
    worker._load_ended.set()
    assert await answer == ""
    assert read == [1]


async def test_an_adapter_unloaded_while_it_is_read_leaves_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end, held = threading.Event(), set()

    def load_adapter(index: int, path: str) -> None:
        assert may_end.wait(60)
        held.add(index)

    def unload_adapter(index: int) -> None:
        if index not in held:
            raise ConfigError("is not loaded")
        held.remove(index)

    worker = worker_on(SimpleNamespace(load_adapter=load_adapter, unload_adapter=unload_adapter), monkeypatch)
    worker._adapter_thread = ThreadPoolExecutor(1)
    answer = worker.load_adapter(LoadAdapter(NumberedAdapter(1, "one", "path")))
    worker.unload_adapter(UnloadAdapter(1), 0.0)  # its sender has given up
    may_end.set()
    assert isinstance(answer, asyncio.Future)
    await answer
    worker._unload_adapters()  # as after a step
    assert not held


def test_a_node_downloads_an_adapter_that_only_node_0_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    read: list[str] = []

    def download(name: str, *, revision: str | None, cache_dir: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, cache_dir, allow_patterns))
        return "here"

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    worker = worker_on(SimpleNamespace(load_adapter=lambda index, path: read.append(path)), monkeypatch)
    worker._config = msgspec.structs.replace(worker._config, download_dir="cache")
    for path, source in (("/of/node/0", "owner/name@c0ffee"), (str(tmp_path), "owner/name"), ("local", "")):
        assert worker._load_adapters((NumberedAdapter(1, "one", path, source),), strict=True) == {}
    assert read == ["here", str(tmp_path), "local"]
    assert asked == [("owner/name", "c0ffee", "cache", ["adapter_config.json", "adapter_model.safetensors"])]
