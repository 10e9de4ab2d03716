"""Memory is counted and runs out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.devices.npu_simulator.activate import Simulator

MIB = 1 << 20


@pytest.fixture(autouse=True)
def empty(simulator: Simulator) -> Iterator[None]:
    torch.npu.synchronize()
    torch.npu.empty_cache()
    yield
    simulator.faults.clear()
    torch.npu.empty_cache()


def test_accounting(simulator: Simulator) -> None:
    free, total = torch.npu.mem_get_info(0)
    assert total == simulator.spec.memory
    block = torch.empty(64 * MIB, dtype=torch.uint8, device="npu:0")
    assert free - torch.npu.mem_get_info(0)[0] >= 64 * MIB
    assert torch.npu.memory_allocated(0) >= 64 * MIB
    assert torch.npu.memory_stats(0)["allocated_bytes.all.peak"] >= 64 * MIB
    assert simulator.cann.used(0) >= 64 * MIB
    del block
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info(0)[0] == free


def test_devices_have_memories_of_their_own() -> None:
    before = torch.npu.mem_get_info(0)[0]
    block = torch.empty(64 * MIB, dtype=torch.uint8, device="npu:1")
    assert torch.npu.mem_get_info(0)[0] == before
    assert torch.npu.mem_get_info(1)[0] <= torch.npu.mem_get_info(1)[1] - 64 * MIB
    assert block.device.index == 1


def test_out_of_memory_and_after(simulator: Simulator) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="NPU out of memory"):
        torch.empty(simulator.spec.memory + 1, dtype=torch.uint8, device="npu")
    kept = torch.empty(simulator.spec.memory // 2, dtype=torch.uint8, device="npu")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(simulator.spec.memory // 2 + 64 * MIB, dtype=torch.uint8, device="npu")
    del kept  # the allocator gives it back and tries again
    assert torch.empty(simulator.spec.memory * 3 // 4, dtype=torch.uint8, device="npu").numel()


def test_memory_that_others_hold(simulator: Simulator) -> None:
    simulator.faults.fill(0, left=32 * MIB)
    assert torch.npu.mem_get_info(0)[0] == 32 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(33 * MIB, dtype=torch.uint8, device="npu:0")


def test_pinned_memory() -> None:
    pinned = torch.arange(8).pin_memory()
    assert pinned.is_pinned()
    assert not torch.arange(8).is_pinned()
    assert torch.equal(pinned.to("npu", non_blocking=True).cpu(), torch.arange(8))
