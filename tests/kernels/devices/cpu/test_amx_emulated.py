"""The native operators of the level ``amx`` on a processor without AMX: their tests once more, with emulated tiles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.contract.cpu_isa import VARIABLE, CpuIsa, chosen_isa
from tests.kits.native import require_native

ROOT = Path(__file__).parents[4]
FILES = (
    "devices/cpu/test_cpu_experts.py",
    "devices/cpu/test_cpu_native.py",
    "devices/cpu/test_cpu_programs.py",
    "devices/cpu/test_float_head.py",
    "devices/cpu/test_native_products.py",
    "devices/cpu/test_verify_attention.py",
    "devices/cpu/test_verify_program.py",
    "weights/gguf/test_gguf_blocks.py",
    "weights/quantization/test_native_fp8.py",
    "weights/quantization/test_native_grouped.py",
    "weights/quantization/test_quantized_cache.py",
)


@pytest.mark.long
@pytest.mark.lane
@pytest.mark.skipif(chosen_isa() != CpuIsa.AVX512, reason="AMX is emulated where the level is avx512")
def test_tests_of_native_operators_pass_with_emulated_amx() -> None:
    require_native()
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    options = ("-q", "-p", "no:cacheprovider", "-p", "tests.kits.emulated_amx")
    files = [f"tests/kernels/{file}" for file in FILES]
    command = [sys.executable, "-m", "pytest", *options, *files]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
