"""MXFP8 weights by A5's operators: e4m3 values with a power of two for each 32 inputs, multiplied with tokens quantized
in the same way (OCP Microscaling Formats, version 1.0).

The vendor's operators take scales in pairs, two for 64 inputs, and weights and scales as transposed views of the layout
in checkpoints.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from kernels.devices.npu.quantized import QuantizedTokens
from kernels.devices.npu.soc import Soc
from kernels.weights.quantization.weights import Fp8Weight

__all__ = ["MX_BLOCK", "NpuMxLinear", "mx_fits", "mx_scales", "round_mx"]

MX_BLOCK = 32
"""Inputs that share a scale."""

_PAIR = 2 * MX_BLOCK
_MAX_DIM = 65535
_HALVES = (torch.bfloat16, torch.float16)


class NpuMxLinear:
    """npu_dynamic_mx_quant, then npu_quant_matmul. 16-bit activations.

    The bias is added separately: the operator's bias for e4m3 is reported to be wrong.
    """

    def __init__(self, weight: Fp8Weight, bias: Tensor | None) -> None:
        self.values = weight.values.t()
        self.scales = mx_scales(weight).transpose(0, 1)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiply(QuantizedTokens(*round_mx(x), x.dtype))

    def multiply(self, tokens: QuantizedTokens) -> Tensor:
        """The product with tokens quantized by ``round_mx``."""
        result: Tensor = torch_npu.npu_quant_matmul(
            tokens.values,
            self.values,
            self.scales,
            pertoken_scale=tokens.scales,
            scale_dtype=torch_npu.float8_e8m0fnu,
            pertoken_scale_dtype=torch_npu.float8_e8m0fnu,
            group_sizes=[1, 1, MX_BLOCK],
            output_dtype=tokens.dtype,
        )
        return result if self.bias is None else result.add_(self.bias)


def mx_fits(weight: Fp8Weight, soc: Soc) -> bool:
    """Whether the device's operators support the weight."""
    return (
        soc.microscaling
        and weight.block == (1, MX_BLOCK)
        and weight.scales.dtype == torch.float8_e8m0fnu
        and weight.activation == "dynamic"
        and weight.dtype in _HALVES
        and weight.shape[1] % _PAIR == 0
        and max(weight.shape) <= _MAX_DIM
    )


def mx_scales(weight: Fp8Weight) -> Tensor:
    """The exponents in the operators' layout: bytes of e8m0 [outputs, inputs / 64, 2]."""
    scales: Tensor = weight.scales.view(torch.uint8).unflatten(1, (-1, 2))
    return scales


def round_mx(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` [tokens, inputs] to e4m3; returns it with its scales, bytes of e8m0 [tokens, inputs / 64, 2]."""
    rounded, scales = torch_npu.npu_dynamic_mx_quant(x, dst_type=torch_npu.float8_e4m3fn)
    return rounded, scales
