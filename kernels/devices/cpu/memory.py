"""The host's memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.devices.cpu.host import host_memory
from kernels.devices.memory import DeviceMemory, MemoryUsage

__all__ = ["CpuMemory"]


class CpuMemory(DeviceMemory):
    """``sharers``: how many processes share the memory of this host."""

    def __init__(self, sharers: int = 1) -> None:
        super().__init__(torch.device("cpu"))
        self._sharers = sharers

    def usage(self) -> MemoryUsage:
        host = host_memory()
        return MemoryUsage(total=host.total // self._sharers, free=host.free // self._sharers)

    def zeros_by_slot(self, *shape: int) -> Tensor:
        return torch.from_numpy(np.zeros(shape, dtype=np.int32))
