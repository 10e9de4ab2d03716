"""An NVIDIA GPU whose results for a token do not depend on what else a step runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.contract.config import RunnerConfig
from kernels.core.layer_context import Delta, LayerContext
from kernels.core.operators import Linear
from kernels.devices.cuda.attention.attention import CudaAttention
from kernels.devices.cuda.capture import CudaCapture
from kernels.devices.cuda.device import CudaDevice
from kernels.devices.cuda.invariant_kernels import InvariantLinear
from kernels.devices.cuda.matmul.low_rank import CudaLowRankDelta
from kernels.devices.fallbacks import Fallbacks
from kernels.devices.invariant.capabilities import InvariantExpertLayers, InvariantLinearLayers, refuse_ranks
from kernels.weights.quantization.weights import Projection

__all__ = ["InvariantCudaDevice"]


class InvariantCudaLinearLayers(InvariantLinearLayers):
    """Products by ``InvariantLinear``, which needs no tiles of one size."""

    skips_adapters = True

    def make_dense(self, weight: Tensor, bias: Tensor | None, shared: bool = False) -> Linear:
        return InvariantLinear(weight, bias)

    def make_delta(self, context: LayerContext, down: Tensor, up: Tensor, sizes: Sequence[int]) -> Delta:
        return CudaLowRankDelta(context, down, up, sizes, invariant=True)

    def make_up(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.own.make_up(shape, dtype, device)

    def make_gated(self, weight: Projection, bias: Tensor | None) -> Linear:
        if isinstance(weight, Tensor):
            return InvariantLinear(weight, bias, gated=True)
        return super().make_gated(weight, bias)


class InvariantCudaDevice(CudaDevice):
    """Like ``CudaDevice``, with products and attention of ``kernels.devices.cuda.invariant_kernels``, and without
    kernels that are for some numbers of tokens only. Quantized weights are dequantized, experts run in turn.
    """

    def __init__(self, config: RunnerConfig) -> None:
        refuse_ranks(config, "GPUs", "with one GPU")
        super().__init__(config)
        fallbacks = Fallbacks()
        self.linear = InvariantCudaLinearLayers(self.elementwise, fallbacks, self.linear)
        self.experts = InvariantExpertLayers(self.linear, fallbacks)
        self.attention = CudaAttention(self.cache, self.memory, config.page_size, invariant=True)
        self.capture = CudaCapture(config, self.memory, self.cache, self.experts)
