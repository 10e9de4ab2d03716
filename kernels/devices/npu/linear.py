"""Linear layers on an NPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.core.layer_context import Delta, LayerContext
from kernels.core.operators import Linear, Norm
from kernels.devices.elementwise import Elementwise
from kernels.devices.fallbacks import Fallbacks
from kernels.devices.linear import LinearLayers, NormThenLinear
from kernels.devices.npu.low_rank import NpuLowRankDelta
from kernels.devices.npu.microscaling import NpuMxLinear, mx_fits
from kernels.devices.npu.norm_quant import NpuGated, NpuNormThenLinear
from kernels.devices.npu.operators import make_linear
from kernels.devices.npu.quantized import NpuInt8Linear, NpuStaticLinear
from kernels.devices.npu.soc import Soc
from kernels.devices.npu.weight_only import NpuWeightOnlyLinear, fits_weight_only
from kernels.weights.quantization.weights import Fp8Weight, GroupedWeight, Int8Weight, Projection, QuantizedWeight

__all__ = ["NpuLinearLayers"]


class NpuLinearLayers(LinearLayers):
    def __init__(self, elementwise: Elementwise, fallbacks: Fallbacks, soc: Soc) -> None:
        super().__init__(elementwise, fallbacks)
        self.soc = soc

    def make_dense(self, weight: Tensor, bias: Tensor | None, shared: bool = False) -> Linear:
        return make_linear(weight, bias, shared, self.soc)

    def make_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        if isinstance(weight, Int8Weight) and NpuInt8Linear.fits(weight):
            return NpuInt8Linear(weight, bias, self.soc)
        if isinstance(weight, Int8Weight) and NpuStaticLinear.fits(weight):
            return NpuStaticLinear(weight, bias, self.soc)
        if isinstance(weight, Int8Weight | GroupedWeight) and fits_weight_only(weight):
            return NpuWeightOnlyLinear(weight, bias)
        if isinstance(weight, Fp8Weight) and mx_fits(weight, self.soc):
            return NpuMxLinear(weight, bias)
        return super().make_quantized(weight, bias)

    def make_gated(self, weight: Projection, bias: Tensor | None) -> Linear:
        if isinstance(weight, QuantizedWeight):
            return NpuGated(self.make_projection(weight, bias), self.elementwise.silu_and_mul)
        return super().make_gated(weight, bias)

    def make_delta(self, context: LayerContext, down: Tensor, up: Tensor, sizes: Sequence[int]) -> Delta:
        return NpuLowRankDelta(context, down, up, sizes)

    def make_norm_then_linear(self, norm: Norm, linear: Linear) -> NormThenLinear:
        if NpuNormThenLinear.fits(norm, linear, self.soc):
            return NpuNormThenLinear(norm, linear)
        return super().make_norm_then_linear(norm, linear)

    def dequantize(self, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
        """Dequantize a weight; 8-bit floats on the host, since A2 and A3 lack them and some casts fail on A5."""
        host = weight.to(torch.device("cpu")) if isinstance(weight, Fp8Weight) else weight
        return host.dequantize(dtype).to(self.elementwise.torch_device)
