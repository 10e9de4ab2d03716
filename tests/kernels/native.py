"""Where the CPU's native operators are tested: on a processor with AMX, and with a C++ compiler."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kernels.cpu.host import has_tiles
from kernels.cpu.native import library
from kernels.platforms.cpu import CpuPlatform

__all__ = ["compiled", "needs_native", "platform"]

needs_native = pytest.mark.skipif(
    not has_tiles() or not any(map(shutil.which, library.COMPILERS)), reason="no AMX, or no C++ compiler"
)


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
