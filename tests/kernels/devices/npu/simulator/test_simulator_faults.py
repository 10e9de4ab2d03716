"""Errors on demand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from kernels.devices.npu_simulator.activate import Simulator
from kernels.devices.npu_simulator.faults import FaultError


@pytest.fixture(autouse=True)
def mended(simulator: Simulator) -> Iterator[None]:
    yield
    simulator.faults.clear()
    assert simulator.cann.attention.value == 0


@pytest.mark.parametrize(
    ("kind", "code"), [("aicore", "507015"), ("lost", "507010"), ("ecc", "507054"), ("link", "507056")]
)
def test_the_nth_operator_breaks_the_device(simulator: Simulator, kind: str, code: str) -> None:
    x = torch.ones(3, device="npu:0")
    simulator.faults.plan(kind, 3)
    x.add_(1)
    x.add_(1)
    with pytest.raises(RuntimeError, match=f"error code is {code}"):
        x.add_(1)
    for touch in (x.cpu, torch.npu.synchronize, lambda: x + 1, lambda: torch.empty(64 << 20, device="npu:0")):
        with pytest.raises(RuntimeError, match=code):
            touch()
    assert torch.ones(2, device="npu:1").add_(1).cpu().tolist() == [2, 2]  # the other device goes on
    simulator.faults.clear()
    assert x.cpu().tolist() == [3, 3, 3]


def test_one_device_and_one_operator(simulator: Simulator) -> None:
    a, b = torch.ones(3, device="npu:0"), torch.ones(3, device="npu:1")
    simulator.faults.plan("aicore", 1, device=1, operator="mul")
    a.mul_(2)
    b.add_(1)
    with pytest.raises(RuntimeError, match="507015"):
        b.mul_(2)
    assert a.cpu().tolist() == [2, 2, 2]


def test_a_fault_inside_a_replay_is_seen(simulator: Simulator) -> None:
    x = torch.ones(3, device="npu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        x.add_(1)
    simulator.faults.plan("aicore", 2, operator="add_")
    graph.replay()
    with pytest.raises(RuntimeError, match="507015"):
        graph.replay()


def test_memory_runs_out_at_an_operator(simulator: Simulator) -> None:
    simulator.faults.plan("oom", 1)
    torch.npu.empty_cache()
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(32 << 20, device="npu") + 1


@pytest.mark.parametrize("text", ["", "aicore", "aicore@x", "flood@1", "aicore@0"])
def test_plans_that_are_none(simulator: Simulator, text: str) -> None:
    with pytest.raises(FaultError):
        simulator.faults.plan_text(text)


def start(code: str, fault: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TROUPE_NPU_FAULT": fault},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


CODE = """
from kernels.devices.npu_simulator.activate import activate
activate("A2")
import torch
x = torch.ones(2, device="npu")
print("begun", flush=True)
for _ in range(5):
    x.add_(1)
print(x.cpu().tolist())
"""


def test_a_fault_by_environment() -> None:
    process = start(CODE, "lost@2@add_")
    out, _ = process.communicate(timeout=400)
    assert process.returncode == 1
    assert "507010" in out


def test_a_hang_lasts() -> None:
    process = start(CODE, "hang@3@add_")
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    assert any("begun" in line for line in lines)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    process.kill()
    process.communicate()
