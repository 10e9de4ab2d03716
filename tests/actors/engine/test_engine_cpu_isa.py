"""An engine whose workers are limited to a lesser instruction set says so, and answers as before."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.contract.cpu_isa import CpuIsa, processor_isa
from tests.kits.engines import small_engine

LEVELS = [str(level) for level in CpuIsa if level <= processor_isa()]


@pytest.mark.parametrize("level", LEVELS)
async def test_a_limited_worker_names_its_instruction_set(tiny_model: Path, level: str) -> None:
    async with small_engine(tiny_model, device="cpu", cpu_isa=level) as engine:
        described = engine.describe()
        assert described["model_info"]["cpu_isa"] == level
        [worker] = described["workers"]
        environment = Path(f"/proc/{worker['pid']}/environ").read_bytes().split(b"\0")
        assert f"TROUPE_CPU_ISA={level}".encode() in environment
        assert level != "avx2" or b"ONEDNN_MAX_CPU_ISA=AVX2" in environment
