"""Workers' processes that are started before the engine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from actors.engine.engine import Engine
from actors.options import Arguments
from actors.protocol.requests import EngineFailed
from actors.workers import early_workers
from actors.workers.early_workers import EarlyWorkers


class Started:
    def __init__(self, environment: Mapping[str, str], modules: Sequence[str]) -> None:
        self.environment, self.modules = environment, modules
        self.begun = self.killed = self.closed = False

    def begin(self) -> None:
        self.begun = True

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    made: list[Started] = []

    def start(*arguments: Any) -> Started:
        made.append(Started(*arguments))
        return made[-1]

    monkeypatch.setattr(early_workers, "BlankProcess", start)
    return made


def test_each_rank_has_one_that_imports_the_model_and_the_rest_are_ended(started: list[Started]) -> None:
    workers = EarlyWorkers(Arguments.from_keywords(model="m", device="cpu", tensor_parallel_size=2))
    assert [each.begun for each in started] == [True, True]
    assert started[0].modules == ["actors.workers.worker", "kernels.execution.runner"]
    assert started[0].environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
    assert workers.take(1) is started[1]
    assert workers.take(1) is None
    workers.close()
    assert [each.closed for each in started] == [True, False]


def test_a_simulator_is_there_before_pytorch(started: list[Started]) -> None:
    EarlyWorkers(Arguments.from_keywords(model="m", device="npu", npu_simulator="A2"))
    assert [each.modules for each in started] == [["actors.workers.worker"]]


def test_what_is_wrong_is_left_for_the_engine_to_tell(started: list[Started], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    workers = EarlyWorkers(Arguments.from_keywords(model="m", device="cuda", base_gpu_id=3))
    assert not started
    assert workers.take(0) is None


async def test_an_engine_that_does_not_come_to_them_ends_them(started: list[Started], tmp_path: Path) -> None:
    arguments = Arguments.from_keywords(model=str(tmp_path), device="cpu")
    with pytest.raises(EngineFailed, match=r"config\.json"):
        await Engine(arguments=arguments, early=EarlyWorkers(arguments)).start()
    assert [each.closed for each in started] == [True]


async def test_an_engine_that_is_never_started_ends_them(started: list[Started], tmp_path: Path) -> None:
    arguments = Arguments.from_keywords(model=str(tmp_path), device="cpu")
    await Engine(arguments=arguments, early=EarlyWorkers(arguments)).aclose()
    assert [each.closed for each in started] == [True]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a socket pair")
async def test_an_engine_makes_them_its_workers(tiny_model: Path) -> None:
    arguments = Arguments.from_keywords(model=str(tiny_model), device="cpu", max_total_tokens=512, cpu_threads=1)
    workers = EarlyWorkers(arguments)
    pid = workers._blank[0].process.pid
    async with Engine(arguments=arguments, early=workers) as engine:
        assert [worker["pid"] for worker in engine.describe()["workers"]] == [pid]
