"""A CPU whose results for a token do not depend on what else a step runs."""

from __future__ import annotations

import dataclasses

from kernels.contract.config import RunnerConfig
from kernels.devices.capture import Capture
from kernels.devices.cpu.device import CpuDevice
from kernels.devices.fallbacks import Fallbacks
from kernels.devices.invariant.capabilities import (
    InvariantAttention,
    InvariantElementwise,
    InvariantExpertLayers,
    InvariantLinearLayers,
    refuse_ranks,
)

__all__ = ["InvariantCpuDevice"]


class InvariantCpuDevice(CpuDevice):
    """Like ``CpuDevice``, with the operators of ``kernels.devices.invariant`` on any processor, and without native
    ones, which use other kernels for few tokens than for many. Quantized weights are dequantized, experts run in turn.
    """

    def __init__(self, config: RunnerConfig) -> None:
        refuse_ranks(config, "ranks", "with --tensor-parallel-size 1")
        super().__init__(config.threads, native=False)
        self.traits = dataclasses.replace(self.traits, samples_apart=True)
        fallbacks, caches = Fallbacks(), self.cache
        self.elementwise = InvariantElementwise(self.torch_device)
        self.linear = InvariantLinearLayers(self.elementwise, fallbacks, self.linear)
        self.experts = InvariantExpertLayers(self.linear, fallbacks)
        self.attention = InvariantAttention(caches, caches, self.memory.put)
        self.capture = Capture()
