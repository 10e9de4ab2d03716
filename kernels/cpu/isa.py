"""Which instruction set the CPU's operators may use: that of the processor, or less where the user limits it.

Imports nothing of torch: oneDNN, ATen and MKL read their own limits once, when torch is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path

__all__ = ["AUTO", "VARIABLE", "CpuIsa", "IsaError", "chosen_isa", "isa_environment", "processor_isa"]

VARIABLE = "TROUPE_CPU_ISA"
AUTO = "auto"

_CPUINFO = Path("/proc/cpuinfo")


class IsaError(ValueError):
    """The environment asks for an instruction set that is unknown, or that this processor lacks."""


class CpuIsa(IntEnum):
    """Levels of instruction sets; each level includes those below it.

    A native operator states the least level that it needs. ``TORCH``: no native operator, on any processor.
    """

    TORCH = 0
    AVX2 = 1
    AVX512 = 2
    AMX = 3

    def __str__(self) -> str:
        return self.name.lower()


_NEEDED = {
    CpuIsa.AMX: {"amx_tile", "amx_bf16", "amx_int8", "avx512_bf16", "avx512_fp16"},
    CpuIsa.AVX512: {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    CpuIsa.AVX2: {"avx2", "fma"},
}
"""Flags of the processor for each level, the highest first."""

_LIMITS = {
    # MKL's name for AVX-512 with VNNI; the next ones bring AMX.
    CpuIsa.AVX512: {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16", "MKL_ENABLE_INSTRUCTIONS": "AVX512_E1"},
    CpuIsa.AVX2: {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
    },
}
"""What keeps torch's own operators to a level. At ``TORCH`` they may use all that the processor has."""


def processor_isa() -> CpuIsa:
    """The highest level that this processor has; TORCH where that is unknown."""
    try:
        flags = set(_CPUINFO.read_text().partition("flags")[2].partition("\n")[0].split())
    except OSError:
        return CpuIsa.TORCH
    return next((level for level, needed in _NEEDED.items() if needed <= flags), CpuIsa.TORCH)


def chosen_isa(environ: Mapping[str, str] | None = None) -> CpuIsa:
    """The level that ``environ`` (the process's, when None) limits the operators to, else the processor's.

    Raises IsaError.
    """
    text = (os.environ if environ is None else environ).get(VARIABLE, "").strip().lower() or AUTO
    highest = processor_isa()
    if text == AUTO:
        return highest
    if text.upper() not in CpuIsa.__members__:
        raise IsaError(f"{text!r} is no instruction set; use {AUTO}, {', '.join(map(str, reversed(CpuIsa)))}")
    chosen = CpuIsa[text.upper()]
    if chosen > highest:
        raise IsaError(f"this processor has no {chosen}; use {highest} or less, or leave it out")
    return chosen


def isa_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that a process needs before it imports torch, so that torch keeps to the level that ``environ`` asks
    for. Limits of these libraries that ``environ`` already sets stay. Raises IsaError.
    """
    chosen = chosen_isa(environ)
    asked = environ.get(VARIABLE, "").strip().lower()
    if asked in ("", AUTO):
        return {VARIABLE: AUTO} if asked else {}
    limits = {name: value for name, value in _LIMITS.get(chosen, {}).items() if name not in environ}
    return {VARIABLE: str(chosen)} | limits
