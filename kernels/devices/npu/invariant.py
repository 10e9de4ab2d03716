"""An NPU with batch-invariant results."""

from __future__ import annotations

import dataclasses

from kernels.contract.config import RunnerConfig
from kernels.devices.capture import Capture
from kernels.devices.fallbacks import Fallbacks
from kernels.devices.invariant.capabilities import (
    InvariantAttention,
    InvariantElementwise,
    InvariantExpertLayers,
    InvariantLinearLayers,
    refuse_ranks,
)
from kernels.devices.npu.cache import InvariantNpuCaches
from kernels.devices.npu.device import NpuDevice
from kernels.devices.sampling import SamplingKernels

__all__ = ["InvariantNpuDevice"]


class InvariantNpuDevice(NpuDevice):
    """Like ``NpuDevice``, with the operators of ``kernels.devices.invariant``: the fused operators choose their tiling
    by the shape of the step, and the order of their sums is not documented. It captures no graphs, dequantizes weights,
    and runs experts one by one.
    """

    def __init__(self, config: RunnerConfig) -> None:
        refuse_ranks(config, "NPUs", "with one NPU")
        super().__init__(config)
        self.traits = dataclasses.replace(self.traits, samples_row_by_row=True)
        fallbacks, caches = Fallbacks(), InvariantNpuCaches(self.memory, self.backends, config.page_size)
        self.elementwise = InvariantElementwise(self.torch_device)
        self.linear = InvariantLinearLayers(self.elementwise, fallbacks, self.linear)
        self.experts = InvariantExpertLayers(self.linear, fallbacks)
        self.cache = caches
        self.attention = InvariantAttention(caches, caches, self.memory.put)
        self.sampling = SamplingKernels()
        self.capture = Capture()
