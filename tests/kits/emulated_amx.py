"""A pytest plugin: native operators of the level ``amx``, compiled with amx_emulation.h, on a processor of ``avx512``.

``pytest -p tests.kits.emulated_amx FILES``. Processes that the tests start are not affected.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from kernels.contract import cpu_isa
from kernels.contract.cpu_isa import CpuIsa, chosen_isa
from kernels.devices.cpu.native.library import OPERATORS

__all__: list[str] = []

_HEADER = Path(__file__).with_name("amx_emulation.h")
_VERSION = hashlib.sha256(_HEADER.read_bytes()).hexdigest()[:16]  # the cache compares flags, and not this header
_REAL = OPERATORS[CpuIsa.AVX512]
_FLAGS = (*_REAL.flags, f"-DEMULATION_{_VERSION}", "-include", str(_HEADER))
OPERATORS[CpuIsa.AMX] = _REAL._replace(flags=_FLAGS, cache="cpu-amx-emulated")
cpu_isa.FEATURES[CpuIsa.AMX] = cpu_isa.FEATURES[CpuIsa.AVX512]
assert chosen_isa() == CpuIsa.AMX, "AMX is emulated on AVX-512, where TROUPE_CPU_ISA sets no other level"
