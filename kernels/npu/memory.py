"""The memory of one NPU, and what a step takes of it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.platforms.base import Memory

__all__ = ["device_memory", "step_memory"]

_LATER = 128 << 20
"""Bytes for what appears only after the measurement: communication buffers, workspaces of other shapes."""


def device_memory(device: torch.device) -> Memory:
    """What the device has, and what this process may still take: free memory, and what its allocator holds unused."""
    free, total = torch.npu.mem_get_info(device)
    held = torch.npu.memory_reserved(device) - torch.npu.memory_allocated(device)
    return Memory(total=total, free=free + held)


def step_memory(device: torch.device, step: Callable[[], None]) -> int:
    """Bytes to leave free beside weights and cache: the most that ``step`` holds at a time, and what the runtime takes
    outside the allocator while it runs (kernels' workspaces, the first use of each kernel).
    """
    torch.npu.synchronize(device)
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats(device)
    before = torch.npu.memory_allocated(device)
    outside = _outside(device)
    step()
    torch.npu.synchronize(device)
    peak = torch.npu.memory_stats(device)["allocated_bytes.all.peak"]
    grown = max(0, _outside(device) - outside)
    torch.npu.empty_cache()
    # Growth outside the allocator has happened already and is missing from the free memory; that of other shapes has
    # not, so as much again is left for it.
    return int(peak - before) + grown + _LATER


def _outside(device: torch.device) -> int:
    """Bytes in use on the device that this process's allocator does not know of."""
    free, total = torch.npu.mem_get_info(device)
    return int(total - free - torch.npu.memory_reserved(device))
