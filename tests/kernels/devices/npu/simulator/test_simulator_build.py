"""The libraries are compiled once, safely, and what is missing is named. And activation in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.contract.errors import UnsupportedError
from kernels.devices.npu_simulator.build import LIBRARIES, BuildError, cann_libraries, package

BUILD = "from kernels.devices.npu_simulator.build import cann_libraries; print(cann_libraries())"


def start(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    return out


def test_two_processes_build_at_once(tmp_path: Path) -> None:
    both = [start(BUILD, XDG_CACHE_HOME=str(tmp_path)) for _ in range(2)]
    folders = {output_of(process).strip() for process in both}
    assert len(folders) == 1
    folder = Path(folders.pop())
    assert {path.name for path in folder.iterdir()} == {f"lib{name}.so" for name in (*LIBRARIES, "troupe_cann")}
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # nothing half-made is left


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="install gcc"):
        cann_libraries()


def test_a_cache_that_others_may_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tmp_path.joinpath("troupe").mkdir()
    tmp_path.joinpath("troupe").chmod(0o777)
    with pytest.raises(BuildError, match="other users may write to it"):
        cann_libraries()


def test_activation_in_its_own_process() -> None:
    code = """
from kernels.devices.npu_simulator.activate import ActivationError, activate, active
assert active() is None
simulator = activate("A5:3:1GiB")
assert activate("A5:3:1GiB") is simulator and active() is simulator
import torch, torch_npu
assert torch.npu.device_count() == 1, "ASCEND_RT_VISIBLE_DEVICES"
assert torch_npu.npu.get_soc_version() == 260
assert torch.npu.mem_get_info()[1] == 1 << 30
try:
    activate("A2")
except ActivationError as error:
    print(error)
logits = torch.zeros(1, 4, device="npu")
try:
    torch_npu.npu_top_k_top_p(logits, None, torch.ones(1, dtype=torch.int32, device="npu"))
except NotImplementedError as error:
    print(error)
weight = torch_npu.npu_format_cast(torch.zeros(16, 16, dtype=torch.bfloat16, device="npu"), 29)
print(torch_npu.get_npu_format(weight))
"""
    out = output_of(start(code, ASCEND_RT_VISIBLE_DEVICES="2"))
    assert "already simulates" in out
    assert "A2 and A3 only" in out
    assert out.splitlines()[-1] == "ND"


def test_torch_came_first() -> None:
    code = """
import torch
from kernels.devices.npu_simulator.activate import activate
activate("A2")
"""
    process = start(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    _, err = process.communicate(timeout=400)
    assert process.returncode == 1
    assert "before the first import of torch" in err


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install -e '\.\[npu-sim\]'"):
        package("torch_npu")
