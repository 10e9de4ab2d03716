"""A device's memory: copies between it and the host, its size, and the state stored there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["DeviceMemory", "MemoryUsage", "PendingCopies"]

PendingCopies = Callable[[], list[Tensor]]
"""Waits for copies to the host and returns them."""


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes. ``free`` is what this process may still take."""

    total: int
    free: int


class DeviceMemory(ABC):
    """The memory of ``torch_device``. The defaults are for a device that shares the host's memory."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    @abstractmethod
    def usage(self) -> MemoryUsage:
        """The device's memory, as it stands now."""

    def put(self, array: npt.NDArray[Any]) -> Tensor:
        """``array`` on the device, for work issued from now on. The tensor may share its memory: leave it unchanged."""
        return torch.from_numpy(array)

    def write(self, target: Tensor, array: npt.NDArray[Any]) -> None:
        """Copy ``array`` [n] to ``target`` [n] of the same dtype, for work issued from now on; it may change then."""
        target.copy_(torch.from_numpy(array))

    def put_pinned(self, array: npt.NDArray[Any]) -> Tensor:
        """Like ``put``, for own kernels that read each of a few numbers once: they may lie in the host's memory."""
        return self.put(array)

    def fetch(self, tensors: Sequence[Tensor], lasting: bool = False) -> PendingCopies:
        """Start to copy ``tensors`` to the host.

        What it returns may be called by any thread, and again. ``lasting``: nothing writes to the tensors before it is
        called, so that work issued from now on need not wait for the copies.
        """
        result = list(tensors)
        return lambda: result

    def wait_for_copies(self) -> None:
        """Work issued from now on waits until everything passed to ``fetch`` is copied: it may overwrite that."""
        return None

    def zeros_by_slot(self, *shape: int) -> Tensor:
        """int32 zeros for state by slot. Memory is taken only where they are written, if the device can do that."""
        return torch.zeros(shape, dtype=torch.int32, device=self.torch_device)

    def measure_step(self, step: Callable[[], None]) -> int:
        """Bytes to leave free for steps, ``step`` being the largest. May return 0 without running it."""
        return 0
