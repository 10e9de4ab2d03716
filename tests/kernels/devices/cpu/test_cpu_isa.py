"""Which instruction set the CPU's operators use: what the processor has, or less where the user says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.contract import cpu_isa
from kernels.contract.cpu_isa import CpuIsa, IsaError, chosen_isa, isa_environment, levels, processor_isa
from kernels.contract.errors import UnsupportedError
from kernels.devices.cpu.device import CpuDevice
from kernels.devices.cpu.native import library
from kernels.devices.cpu.native.library import NEEDED_ISA, OPERATORS

NEON = "fp asimd asimdhp asimddp bf16 i8mm"
AVX2 = "fpu sse4_2 avx avx2 fma f16c avx512f avx512dq avx512cd avx512bw avx512vl avx512_vnni avx512vbmi"
AVX512 = f"{AVX2} avx512_bf16"
AMX = f"{AVX512} avx512_fp16 amx_bf16 amx_tile amx_int8"


@pytest.fixture
def processor(monkeypatch, tmp_path):
    """Give it the flags of a processor."""
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(cpu_isa, "_CPUINFO", cpuinfo)
    monkeypatch.delenv("TROUPE_CPU_ISA", raising=False)

    def has(flags: str) -> None:
        name = "Features" if "asimd" in flags else "flags"
        cpuinfo.write_text(f"processor\t: 0\n{name}\t\t: {flags}\nbugs\t\t: none\n")

    return has


@pytest.mark.parametrize(
    ("flags", "level"),
    [(AMX, CpuIsa.AMX), (AVX512, CpuIsa.AVX512), (AVX2, CpuIsa.AVX2), (NEON, CpuIsa.NEON), ("fpu", CpuIsa.TORCH)],
)
def test_the_processor_decides_unless_it_is_limited(flags, level, processor):
    processor(flags)
    assert processor_isa() == chosen_isa({}) == chosen_isa({"TROUPE_CPU_ISA": "auto"}) == level
    assert isa_environment({}) == {}
    assert isa_environment({"TROUPE_CPU_ISA": " auto "}) == {"TROUPE_CPU_ISA": "auto"}
    for lower in CpuIsa:
        if lower in levels(level):
            assert chosen_isa({"TROUPE_CPU_ISA": str(lower)}) == lower
            assert isa_environment({"TROUPE_CPU_ISA": str(lower)})["TROUPE_CPU_ISA"] == str(lower)
        else:
            with pytest.raises(IsaError, match=f"has no {lower}; use {level} or less"):
                chosen_isa({"TROUPE_CPU_ISA": str(lower)})


def test_a_processor_of_unknown_flags_runs_torch_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_isa, "_CPUINFO", tmp_path / "absent")
    assert processor_isa() == CpuIsa.TORCH


def test_an_unknown_instruction_set_is_refused(monkeypatch):
    with pytest.raises(IsaError, match="'sse9' is no instruction set; use auto, neon, amx, avx512, avx2, torch"):
        chosen_isa({"TROUPE_CPU_ISA": "sse9"})
    monkeypatch.setenv("TROUPE_CPU_ISA", "sse9")
    with pytest.raises(UnsupportedError, match="TROUPE_CPU_ISA: 'sse9'"):
        CpuDevice()


def test_products_of_aarch64_are_compiled_for_what_the_processor_has():
    assert library.neon_flags(frozenset(NEON.split())) == ("-march=armv8.2-a+bf16+i8mm",)
    assert library.neon_flags(frozenset({"asimd"})) == ("-march=armv8-a",)


def test_x86_is_compiled_for_what_a_level_needs_and_no_more():
    assert library.x86_flags(CpuIsa.AVX2) == ("-mavx2", "-mf16c", "-mfma")
    flags = library.x86_flags(CpuIsa.AMX)
    assert {"-mamx-tile", "-mavx512fp16", "-mavx512vnni"} < set(flags)
    assert not any(flag.startswith("-march") for flag in flags)


def test_limits_of_torch_that_a_user_set_stay(processor):
    processor(AMX)
    limited = isa_environment({"TROUPE_CPU_ISA": "avx2", "ONEDNN_MAX_CPU_ISA": "SSE41"})
    assert "ONEDNN_MAX_CPU_ISA" not in limited
    assert limited["ATEN_CPU_CAPABILITY"] == "avx2"
    assert set(isa_environment({"TROUPE_CPU_ISA": "torch"})) == {"TROUPE_CPU_ISA"}


def test_a_lower_level_replaces_the_limits_of_a_parent(processor):
    processor(AMX)
    parent = isa_environment({"TROUPE_CPU_ISA": "avx512"})
    child = parent | isa_environment(parent | {"TROUPE_CPU_ISA": "avx2"})
    assert child == isa_environment({"TROUPE_CPU_ISA": "avx2"})
    kept = child | isa_environment(child | {"TROUPE_CPU_ISA": "avx512"})
    assert kept["ONEDNN_MAX_CPU_ISA"] == "AVX2"


def test_native_operators_are_off_below_the_level_they_need(processor, monkeypatch):
    processor(AMX)
    opened = []
    monkeypatch.setattr("kernels.devices.cpu.native_operators.open_library", lambda source: opened.append(source))
    monkeypatch.setattr("kernels.devices.cpu.native_operators.built", lambda source: Path())
    for level in levels(CpuIsa.AMX):
        opened.clear()
        monkeypatch.setenv("TROUPE_CPU_ISA", str(level))
        platform = CpuDevice()
        platform.select_dtype("bfloat16", None)
        assert platform.traits.cpu_isa == str(level)
        assert opened == ([OPERATORS[level]] if level >= NEEDED_ISA else [])


@pytest.mark.parametrize(("build", "dtype"), [(object(), torch.bfloat16), (None, torch.float32)])
def test_auto_is_bf16_while_its_operators_are_compiled(build, dtype, processor, monkeypatch):
    processor(AMX)
    monkeypatch.setenv("TROUPE_CPU_ISA", "avx2")
    monkeypatch.setattr("kernels.devices.cpu.device.bf16_is_fast", lambda: False)
    for name, value in {"open_library": None, "built": None, "start_build": build}.items():
        monkeypatch.setattr(f"kernels.devices.cpu.native_operators.{name}", lambda source, value=value: value)
    assert CpuDevice().select_dtype("auto", "bfloat16") == dtype


@pytest.mark.parametrize("level", [level for level in (CpuIsa.AVX512, CpuIsa.AVX2) if level <= processor_isa()])
def test_torch_keeps_to_the_level(level):
    """A product of bf16 and a function, as oneDNN's own log names it, in a process with the variables of a worker."""
    program = (
        "import torch; x = torch.ones(64, 64).bfloat16(); torch.nn.functional.linear(x, x); "
        "torch.ones(64, 64).to_mkldnn().relu(); "
        "print('capability', torch.backends.cpu.get_cpu_capability())"
    )
    limits = isa_environment({"TROUPE_CPU_ISA": str(level)})
    environment = os.environ | limits | {"ONEDNN_VERBOSE": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "onednn_verbose" in done.stdout
    assert "amx" not in done.stdout
    if level < CpuIsa.AVX512:
        assert "avx512" not in done.stdout.lower()
        assert "capability AVX2" in done.stdout
