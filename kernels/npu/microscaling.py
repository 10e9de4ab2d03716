"""Weights of MXFP8 by A5's own operators: e4m3 numbers of which 32 along the inputs share a power of two, multiplied
with tokens that are rounded in the same way (OCP Microscaling Formats, version 1.0).

The vendor's operators take scales in pairs, two to 64 inputs, and a weight and its scales as transposed views of how
checkpoints store them (facts 4.2).
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from kernels.npu.soc import Soc
from kernels.quantization.weights import Fp8Weight

__all__ = ["MX_BLOCK", "NpuMxLinear", "mx_fits", "mx_scales", "round_mx"]

MX_BLOCK = 32
"""Inputs that share a scale."""

_PAIR = 2 * MX_BLOCK
_MOST = 65535
_HALVES = (torch.bfloat16, torch.float16)


class NpuMxLinear:
    """npu_dynamic_mx_quant, then npu_quant_matmul. 16-bit activations.

    The bias is added afterwards: the operator's own addition to sums of e4m3 is reported to be wrong.
    """

    def __init__(self, weight: Fp8Weight, bias: Tensor | None) -> None:
        self.values = weight.values.t()
        self.scales = mx_scales(weight).transpose(0, 1)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        rounded, scales = round_mx(x)
        return self.multiply(rounded, scales, x.dtype)

    def multiply(self, rounded: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Of tokens as ``round_mx`` gives them."""
        found: Tensor = torch_npu.npu_quant_matmul(
            rounded,
            self.values,
            self.scales,
            pertoken_scale=scales,
            scale_dtype=torch_npu.float8_e8m0fnu,
            pertoken_scale_dtype=torch_npu.float8_e8m0fnu,
            group_sizes=[1, 1, MX_BLOCK],
            output_dtype=dtype,
        )
        return found if self.bias is None else found.add_(self.bias)


def mx_fits(weight: Fp8Weight, soc: Soc) -> bool:
    """Whether the device multiplies such a weight itself."""
    return (
        soc.microscaling
        and weight.block == (1, MX_BLOCK)
        and weight.scales.dtype == torch.float8_e8m0fnu
        and weight.activation == "dynamic"
        and weight.dtype in _HALVES
        and weight.shape[1] % _PAIR == 0
        and max(weight.shape) <= _MOST
    )


def mx_scales(weight: Fp8Weight) -> Tensor:
    """The exponents as the operators take them: bytes of e8m0 [outputs, inputs / 64, 2]."""
    return weight.scales.view(torch.uint8).unflatten(1, (-1, 2))


def round_mx(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` [tokens, inputs] in e4m3, and its scales, bytes of e8m0 [tokens, inputs / 64, 2]."""
    rounded, scales = torch_npu.npu_dynamic_mx_quant(x, dst_type=torch_npu.float8_e4m3fn)
    return rounded, scales
