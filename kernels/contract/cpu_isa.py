"""The instruction set that the CPU's operators may use: the processor's, or a lower level that the user sets.

Imports no torch: oneDNN, ATen and MKL read their limits once, when torch is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path

__all__ = [
    "AUTO",
    "FEATURES",
    "VARIABLE",
    "CpuIsa",
    "IsaError",
    "chosen_isa",
    "isa_environment",
    "levels",
    "processor_features",
    "processor_isa",
]

VARIABLE = "TROUPE_CPU_ISA"
AUTO = "auto"

_CPUINFO = Path("/proc/cpuinfo")


class IsaError(ValueError):
    """The environment names an instruction set that is unknown, or that this processor lacks."""


class CpuIsa(IntEnum):
    """Levels of instruction sets; each level includes those below it. The native operators are compiled for a level.

    ``AVX2``: with FMA and F16C. ``AVX512``: with BF16, VNNI and VBMI (AMD since Zen 4, Intel Xeon since Sapphire
    Rapids). ``NEON``: of aarch64; it includes ``TORCH`` only. ``TORCH``: no native operator, on any processor.
    """

    TORCH = 0
    AVX2 = 1
    AVX512 = 2
    AMX = 3
    NEON = 4

    def __str__(self) -> str:
        return self.name.lower()


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512vbmi"}
FEATURES = {
    CpuIsa.AMX: _AVX512 | {"amx_tile", "amx_bf16", "amx_int8", "avx512_fp16"},
    CpuIsa.AVX512: _AVX512,
    CpuIsa.AVX2: _AVX2,
    CpuIsa.NEON: frozenset({"asimd"}),
}
"""What each level needs of the processor, by Linux's names; the highest level first."""

_LIMITS = {
    # MKL's name for AVX-512 with VNNI; the next ones bring AMX.
    CpuIsa.AVX512: {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16", "MKL_ENABLE_INSTRUCTIONS": "AVX512_E1"},
    CpuIsa.AVX2: {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
    },
}
"""Variables that limit torch's own operators to a level. At ``TORCH`` they may use everything the processor has."""


def processor_features() -> frozenset[str]:
    """What the system calls the processor's instruction sets; empty where that is unknown."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return frozenset()
    # "flags" of x86-64, "Features" of aarch64
    return next((frozenset(line.split()) for line in lines if line.startswith(("flags", "Features"))), frozenset())


def processor_isa() -> CpuIsa:
    """The highest level that this processor has; TORCH where that is unknown."""
    features = processor_features()
    return next((level for level, needed in FEATURES.items() if needed <= features), CpuIsa.TORCH)


def levels(highest: CpuIsa) -> list[CpuIsa]:
    """The levels that a processor of ``highest`` has, the highest first."""
    if highest == CpuIsa.NEON:
        return [CpuIsa.NEON, CpuIsa.TORCH]
    return [level for level in reversed(CpuIsa) if level <= highest]


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
    if chosen not in levels(highest):
        raise IsaError(f"this processor has no {chosen}; use {highest} or less, or leave it out")
    return chosen


def isa_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that a process needs before it imports torch, so that torch stays within the level of ``environ``.
    Limits of these libraries that ``environ`` already sets stay, unless they are those of a higher level, which a
    parent process with that level leaves to its children. Raises IsaError.
    """
    chosen = chosen_isa(environ)
    requested = environ.get(VARIABLE, "").strip().lower()
    if requested in ("", AUTO):
        return {VARIABLE: AUTO} if requested else {}
    higher = [limits for level, limits in _LIMITS.items() if level > chosen]
    limits = {
        name: value
        for name, value in _LIMITS.get(chosen, {}).items()
        if name not in environ or any(environ[name] == limits.get(name) for limits in higher)
    }
    return {VARIABLE: str(chosen)} | limits
