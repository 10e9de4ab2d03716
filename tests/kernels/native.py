"""Where the CPU's native operators are tested: with their instruction set, by the processor and the user's limit, and
with a C++ compiler. Others skip and say why.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kernels.cpu.isa import chosen_isa
from kernels.cpu.native import library
from kernels.platforms.cpu import CpuPlatform

__all__ = ["EXACT_DTYPE", "compiled", "needs_native", "platform", "require_native"]


def _missing() -> str:
    """Why there are no native operators here; "" where there are."""
    needed, chosen = library.NEEDED_ISA, chosen_isa()
    if chosen < needed:
        return f"native operators need the instruction set {needed}; this processor, or TROUPE_CPU_ISA, has {chosen}"
    if not any(map(shutil.which, library.COMPILERS)):
        return f"native operators need a C++ compiler, one of {', '.join(library.COMPILERS)}"
    return ""


_MISSING = _missing()
needs_native = pytest.mark.skipif(bool(_MISSING), reason=_MISSING)
EXACT_DTYPE = "float32" if _MISSING else "auto"
"""In which a token's result depends on no other: oneDNN's bf16 changes near ties with the number of rows."""


def require_native() -> None:
    """Skip the running test where there are no native operators; else compile them, once on this machine."""
    if _MISSING:
        pytest.skip(_MISSING)
    library.build()


@pytest.fixture(scope="module")
def compiled() -> Path:
    """The library, compiled once on this machine."""
    return library.build()


@pytest.fixture
def platform(compiled: Path) -> CpuPlatform:
    """With native operators, in bf16."""
    platform = CpuPlatform(2)
    platform.dtype("bfloat16", None)
    return platform
