"""The memory of an accelerator: copies go through pinned buffers, and the allocator is asked what a step takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from kernels.devices.memory import DeviceMemory, MemoryUsage, PendingCopies
from kernels.devices.staging import Staging, fetch

__all__ = ["StagedMemory", "device_memory", "step_memory"]

_LATER = 128 << 20
"""Bytes for what appears only after the measurement: communication buffers, workspaces of other shapes."""


class StagedMemory(DeviceMemory):
    """``pinned_reads``: kernels may read pinned memory. ``copy_stream``: copies that last go on a stream of their own.
    ``autotunes``: a step that runs for the first time measures its kernels, with memory that later steps do not take.

    One thread copies to the device.
    """

    def __init__(self, torch_device: torch.device, pinned_reads: bool, copy_stream: bool, autotunes: bool) -> None:
        super().__init__(torch_device)
        self._pinned_reads, self._copy_stream, self._autotunes = pinned_reads, copy_stream, autotunes
        self._staging: Staging | None = None
        self._beside: torch.cuda.Stream | None = None
        self._step_bytes = 0

    def usage(self) -> MemoryUsage:
        return device_memory(self.torch_device)

    def put(self, array: npt.NDArray[Any]) -> Tensor:
        if self._staging is None:
            self._staging = Staging(self.torch_device)
        return self._staging.put(array)

    def write(self, target: Tensor, array: npt.NDArray[Any]) -> None:
        if self._staging is None:
            self._staging = Staging(self.torch_device)
        self._staging.write(target, torch.from_numpy(array))

    def put_pinned(self, array: npt.NDArray[Any]) -> Tensor:
        if not self._pinned_reads:
            return self.put(array)
        if self._staging is None:
            self._staging = Staging(self.torch_device)
        return self._staging.put_pinned(array)

    def fetch(self, tensors: Sequence[Tensor], lasting: bool = False) -> PendingCopies:
        if not (lasting and self._copy_stream):
            return fetch(tensors)
        if self._beside is None:
            self._beside = torch.cuda.Stream(self.torch_device)
        return fetch(tensors, self._beside)

    def wait_for_copies(self) -> None:
        if self._beside is not None:
            torch.cuda.current_stream(self.torch_device).wait_stream(self._beside)

    def measure_step(self, step: Callable[[], None]) -> int:
        self._step_bytes = step_memory(self.torch_device, step, self._autotunes)
        return self._step_bytes

    def fits_step(self) -> bool:
        """Whether a largest step finds memory. What the allocator cannot give back belongs to graphs, used or not."""
        backend = torch.get_device_module(self.torch_device)
        backend.empty_cache()
        return bool(backend.mem_get_info(self.torch_device)[0] >= self._step_bytes)


def device_memory(device: torch.device) -> MemoryUsage:
    """The device's memory. This process may still take what is free, and what its allocator holds unused."""
    backend = torch.get_device_module(device)
    free, total = backend.mem_get_info(device)
    held = backend.memory_reserved(device) - backend.memory_allocated(device)
    return MemoryUsage(total=total, free=free + held)


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
