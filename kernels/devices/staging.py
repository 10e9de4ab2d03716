"""Copies between host and device that the host does not wait for.

The device reads and writes host memory by itself only where it is pinned, and long after the call that asked for it.
Arrays therefore go through pinned buffers that are filled one after the other, and none is filled again before the
event behind its last copy has come. Results come back into pinned tensors of their own, behind an event each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.devices.memory import PendingCopies

__all__ = ["Staging", "fetch"]

_ALIGN = 64


class Staging:
    """Pinned memory of ``buffers`` times ``size`` bytes. One thread uses it, with one current stream."""

    def __init__(self, device: torch.device, buffers: int = 4, size: int = 1 << 20) -> None:
        self._device, self._size = device, size
        self._narrow = device.type == "npu"
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(buffers)]
        self._events = [torch.get_device_module(device).Event() for _ in range(buffers)]
        self._at = self._filled = 0

    def put(self, array: npt.NDArray[Any]) -> Tensor:
        """``array`` as a new tensor on the device, there for what the current stream runs next. The array may be
        changed at once. On an NPU float64 becomes float32, as in every cast there.
        """
        if self._narrow and array.dtype == np.float64:
            array = array.astype(np.float32)
        source = torch.from_numpy(np.ascontiguousarray(array))
        result = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        self.write(result.view(-1), source.view(-1))
        return result

    def write(self, target: Tensor, flat: Tensor) -> None:
        """Copy ``flat`` of the host to ``target`` [its length] of the device, of the same dtype, as ``put`` does."""
        done, total = 0, len(flat)
        while done < total:
            room = (self._size - self._filled) // flat.itemsize
            if not room:
                self._rotate()
                continue
            count = min(room, total - done)
            end = self._filled + count * flat.itemsize
            staged = self._buffers[self._at][self._filled : end].view(flat.dtype)
            staged.copy_(flat[done : done + count])
            target[done : done + count].copy_(staged, non_blocking=True)
            self._filled = min(self._size, -(-end // _ALIGN) * _ALIGN)
            done += count

    def put_pinned(self, array: npt.NDArray[Any]) -> Tensor:
        """``array`` in pinned memory, for kernels of our own that are issued next: a read takes as long as a small
        copy, but nothing stands still between a copy and the kernels around it. What no buffer holds is ``put``.
        """
        source = torch.from_numpy(np.ascontiguousarray(array)).view(-1)
        if source.nbytes > self._size:
            return self.put(array)
        if self._filled + source.nbytes > self._size:
            self._rotate()
        end = self._filled + source.nbytes
        staged = self._buffers[self._at][self._filled : end].view(source.dtype)
        staged.copy_(source)
        self._filled = min(self._size, -(-end // _ALIGN) * _ALIGN)
        return staged.view(array.shape)

    def _rotate(self) -> None:
        """The next buffer, once the device has read what was last in it."""
        self._events[self._at].record()
        self._at = (self._at + 1) % len(self._buffers)
        self._events[self._at].synchronize()  # one that was never recorded has come
        self._filled = 0


def fetch(tensors: Sequence[Tensor], beside: torch.cuda.Stream | None = None) -> PendingCopies:
    """Start copies to the host behind the current stream's work; what is returned waits for them alone.

    ``beside``: a stream to copy on, so that what the current one has next does not wait for them; nothing may write to
    the tensors meanwhile, but they may be given up.
    """
    if not tensors:
        return list
    result = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    event = torch.get_device_module(tensors[0].device).Event()
    if beside is None:
        for there, here in zip(tensors, result, strict=True):
            here.copy_(there, non_blocking=True)
        event.record()
    else:
        beside.wait_stream(torch.cuda.current_stream(beside.device))
        with torch.cuda.stream(beside):
            for there, here in zip(tensors, result, strict=True):
                here.copy_(there, non_blocking=True)
                there.record_stream(beside)
            event.record()

    def wait() -> list[Tensor]:
        event.synchronize()
        return result

    return wait
