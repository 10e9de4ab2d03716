"""The host's memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.devices.cpu.host import host_memory
from kernels.devices.memory import DeviceMemory, MemoryUsage

__all__ = ["CpuMemory"]


class CpuMemory(DeviceMemory):
    """``ranks``: how many processes run the model together on this host and share its memory."""

    def __init__(self, ranks: int = 1) -> None:
        super().__init__(torch.device("cpu"))
        self._ranks = ranks

    def usage(self) -> MemoryUsage:
        host = host_memory()
        return MemoryUsage(total=host.total // self._ranks, free=host.free // self._ranks)

    def zeros_by_slot(self, *shape: int) -> Tensor:
        return torch.from_numpy(np.zeros(shape, dtype=np.int32))
