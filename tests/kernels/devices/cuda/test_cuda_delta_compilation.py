"""The kernels of gated delta nets compile for the GPUs they are made for and spill no registers; no GPU is needed. The
shapes are those of Qwen3-Next and of Kimi Linear."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
import triton

from kernels.core.batch import StateSegments
from kernels.devices.cuda.delta_rule import CudaDeltaRule
from kernels.devices.delta_rule import DeltaChunks, DeltaInputs
from tests.kernels.devices.cuda.compiled import SHARED, compiling, empty

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")


def step(by_channel: bool, few: bool) -> None:
    numbers, channels = (empty(3, dtype=torch.int64) for _ in range(3)), 2 * 16 * 128 + 32 * 128
    tokens, sources, targets = numbers
    rows = StateSegments(tokens.view(3, 1), sources, targets)
    if few:
        rows = StateSegments(empty(3, 4, dtype=torch.int64), sources, None, lengths=targets, few=True)
    decays = empty(5, 32, 128 if by_channel else 1, dtype=torch.float32)
    mixed = empty(5, channels, dtype=torch.bfloat16)
    inputs = DeltaInputs(mixed, mixed, empty(5, 32, dtype=torch.float32), decays)
    cache = [empty(9, 3, channels, dtype=torch.float32), empty(9, 32, 128, 128, dtype=torch.float32)]
    weight, out = empty(4, channels, dtype=torch.float32), empty(5, 32, 128, dtype=torch.bfloat16)
    assert CudaDeltaRule().step(inputs, weight, cache, rows, out, 2)


def scan_prompt(by_channel: bool, count: int) -> None:
    def rows(width: int) -> torch.Tensor:
        return empty(2, 32, count, 64, width, dtype=torch.float32)

    solved = empty(2, 32, count, 256, 64, dtype=torch.float32).transpose(3, 4)  # as torch returns it
    changes, reads = solved.split((128, 128), -1)
    forgets = empty(2, 32, count, 128 if by_channel else 1, dtype=torch.float32)
    chunks = DeltaChunks(changes, reads, rows(128), rows(64), rows(128), forgets)
    CudaDeltaRule().scan(chunks, empty(2, 32, 128, 128, dtype=torch.float32))


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("by_channel", [False, True], ids=["head", "channel"])
def test_scans_of_delta_nets_compile(
    by_channel: bool, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for any number of chunks, and spill next to nothing."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with compiling(monkeypatch, capability) as kernels:
        for count in (1, 9, 16):
            scan_prompt(by_channel, count)
    (kernel,) = kernels
    assert kernel.kernel == "_scan"
    assert kernel.shared <= SHARED[capability], kernel
    assert kernel.spilled <= 400, kernel


@pytest.mark.parametrize("capability", SHARED)
def test_steps_of_delta_nets_compile(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with compiling(monkeypatch, capability) as kernels:
        for by_channel, few in product((False, True), (False, True)):
            step(by_channel, few)
    for each in kernels:
        assert each.shared <= SHARED[capability], each
        assert not each.spilled, each
