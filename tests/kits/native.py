"""Conditions for tests of the CPU's native operators: their instruction set, by the processor and the user's limit, and
a C++ compiler. Without them tests skip and give the reason.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kernels.contract.cpu_isa import chosen_isa
from kernels.devices.cpu.device import CpuDevice
from kernels.devices.cpu.native import library

__all__ = ["EXACT_DTYPE", "MISSING", "compiled", "needs_native", "platform", "require_native"]


def _missing() -> str:
    """Why there are no native operators; "" if there are."""
    chosen = chosen_isa()
    if chosen < library.NEEDED_ISA:
        return f"native operators need AVX2 or NEON; this processor, or TROUPE_CPU_ISA, has {chosen}"
    if not any(map(shutil.which, library.COMPILERS)):
        return f"native operators need a C++ compiler, one of {', '.join(library.COMPILERS)}"
    return ""


MISSING = _missing()
needs_native = pytest.mark.skipif(bool(MISSING), reason=MISSING)
EXACT_DTYPE = "float32" if MISSING else "auto"
"""A dtype in which a token's result does not depend on the batch: oneDNN's bf16 changes near ties with the number of
rows."""


def require_native() -> None:
    """Skip the running test without native operators; otherwise compile them, once on this machine."""
    if MISSING:
        pytest.skip(MISSING)
    library.build()


@pytest.fixture(scope="module")
def compiled() -> Path:
    """The library, compiled once on this machine."""
    return library.build()


@pytest.fixture
def platform(compiled: Path) -> CpuDevice:
    """With native operators, in bf16."""
    platform = CpuDevice(2)
    platform.select_dtype("bfloat16", None)
    return platform
