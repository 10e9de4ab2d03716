"""Linear layers on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.core.layer_context import Delta, LayerContext
from kernels.core.operators import Linear, Norm
from kernels.devices.cuda.elementwise.norms import CudaNorm
from kernels.devices.cuda.matmul.autotune import Choices
from kernels.devices.cuda.matmul.eight_bit import EightBitLinear
from kernels.devices.cuda.matmul.grouped import GroupedLinear, WideWeight
from kernels.devices.cuda.matmul.linear import CudaLinear
from kernels.devices.cuda.matmul.low_rank import CudaLowRankDelta, make_up
from kernels.devices.cuda.matmul.norm_then_linear import CudaNormThenLinear, Fuses
from kernels.devices.cuda.matmul.residual_linear import CudaResidualLinear
from kernels.devices.elementwise import Elementwise
from kernels.devices.fallbacks import Fallbacks
from kernels.devices.linear import LinearLayers, NormThenLinear, ResidualLinear
from kernels.weights.quantization.weights import Fp8Weight, GroupedWeight, Int8Weight, Projection, QuantizedWeight

__all__ = ["CudaLinearLayers"]


class CudaLinearLayers(LinearLayers):
    """``choices``: measures alternative kernels."""

    skips_adapters = True

    def __init__(self, elementwise: Elementwise, fallbacks: Fallbacks, choices: Choices) -> None:
        super().__init__(elementwise, fallbacks)
        self._device = elementwise.torch_device
        self._wide = WideWeight(self._device)
        self._choices = choices

    def make_dense(self, weight: Tensor, bias: Tensor | None, shared: bool = False) -> Linear:
        return CudaLinear(weight, bias, self._choices)

    def make_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        return self.own_quantized(weight, bias, gated=False) or super().make_quantized(weight, bias)

    def make_gated(self, weight: Projection, bias: Tensor | None) -> Linear:
        if isinstance(weight, Tensor):
            return CudaLinear(weight, bias, self._choices, gated=True)
        return self.own_quantized(weight, bias, gated=True) or super().make_gated(weight, bias)

    def make_norm_then_linear(self, norm: Norm, linear: Linear) -> NormThenLinear:
        if isinstance(norm, CudaNorm) and isinstance(linear, Fuses):
            return CudaNormThenLinear(norm, linear, self._choices)
        return super().make_norm_then_linear(norm, linear)

    def fuse_adapted(self, linear: Linear, delta: Delta, gated: bool) -> Linear:
        if isinstance(linear, CudaLinear) and isinstance(delta, CudaLowRankDelta):
            return CudaLinear(linear.weight, linear.bias, self._choices, gated, delta=delta)
        return super().fuse_adapted(linear, delta, gated)

    def make_up(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return make_up(shape, dtype, device)

    def make_delta(self, context: LayerContext, down: Tensor, up: Tensor, sizes: Sequence[int]) -> Delta:
        return CudaLowRankDelta(context, down, up, sizes)

    def make_residual(self, linear: Linear) -> ResidualLinear:
        return CudaResidualLinear(linear)

    def own_quantized(self, weight: Projection, bias: Tensor | None, gated: bool) -> Linear | None:
        """A layer with custom kernels for a quantized weight; None if there is none."""
        if isinstance(weight, QuantizedWeight) and weight.clip is not None:
            return None
        if isinstance(weight, Int8Weight) and weight.activation is None:
            weight = weight.grouped()
        if isinstance(weight, GroupedWeight) and weight.activation is None and GroupedLinear.fits(weight):
            return GroupedLinear(weight, bias, self._wide, self._choices, gated)
        if isinstance(weight, Int8Weight | Fp8Weight) and EightBitLinear.fits(weight, self._device):
            return EightBitLinear(weight, bias, self._choices, gated)
        return None
