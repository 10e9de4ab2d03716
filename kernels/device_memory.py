"""The memory of one accelerator, and what a step takes of it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.platforms.base import Memory

__all__ = ["device_memory", "step_memory"]

_LATER = 128 << 20
"""Bytes for what appears only after the measurement: communication buffers, workspaces of other shapes."""


def device_memory(device: torch.device) -> Memory:
    """What the device has, and what this process may still take: free memory, and what its allocator holds unused."""
    backend = torch.get_device_module(device)
    free, total = backend.mem_get_info(device)
    held = backend.memory_reserved(device) - backend.memory_allocated(device)
    return Memory(total=total, free=free + held)


def step_memory(device: torch.device, step: Callable[[], None], tries: bool = False) -> int:
    """Bytes to leave free beside weights and cache: the most that ``step`` holds at a time, and what the runtime takes
    outside the allocator while it runs (kernels' workspaces, the first use of each kernel). ``tries``: whether the
    first also tries what is quickest, with memory that no later one holds; then it is run twice.
    """
    backend = torch.get_device_module(device)
    backend.synchronize(device)
    backend.empty_cache()
    backend.reset_peak_memory_stats(device)
    before = backend.memory_allocated(device)
    outside = _outside(device)
    if tries:
        step()
        backend.synchronize(device)
        backend.empty_cache()
        backend.reset_peak_memory_stats(device)
    step()
    backend.synchronize(device)
    peak = backend.memory_stats(device)["allocated_bytes.all.peak"]
    grown = max(0, _outside(device) - outside)
    backend.empty_cache()
    # Growth outside the allocator has happened already and is missing from the free memory; that of other shapes has
    # not, so as much again is left for it.
    return int(peak - before) + grown + _LATER


def _outside(device: torch.device) -> int:
    """Bytes in use on the device that this process's allocator does not know of."""
    backend = torch.get_device_module(device)
    free, total = backend.mem_get_info(device)
    return int(total - free - backend.memory_reserved(device))
