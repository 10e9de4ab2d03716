"""Weight-only quantized linear layers: integer weights and floating inputs, by npu_weight_quant_batchmatmul."""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from kernels.weights.quantization.weights import GroupedWeight, Int8Weight, QuantizedWeight

__all__ = ["NpuWeightOnlyLinear", "fits_weight_only"]

_MAX_DIM = 65535
_GROUPS = 32
"""Divisor of the operator's group sizes."""


def fits_weight_only(weight: QuantizedWeight) -> bool:
    """Whether the operator supports the weight."""
    if weight.dtype not in (torch.bfloat16, torch.float16) or max(weight.shape) > _MAX_DIM:
        return False
    if isinstance(weight, Int8Weight):
        return weight.activation is None
    return (
        isinstance(weight, GroupedWeight)
        and weight.activation is None
        and (weight.group == weight.shape[1] or weight.group % _GROUPS == 0)
        and weight.shape[0] % 8 == 0
    )


class NpuWeightOnlyLinear:
    """The weight is [inputs, outputs] in rows: the vendor supports tiles only in compiled graphs. An int8 weight is a
    transposed view, as the vendor recommends; 4-bit weights are packed by the device."""

    def __init__(self, weight: Int8Weight | GroupedWeight, bias: Tensor | None) -> None:
        self.order: Tensor | None = None
        self.group = 0
        self.offsets: Tensor | None = None
        if isinstance(weight, Int8Weight):
            self.values = weight.values.t()
            self.scales = weight.scales.to(weight.dtype)
        else:
            middle = 1 << (weight.bits - 1)
            whole = (weight.unpacked().to(torch.int32) - middle).t().contiguous()
            packs = weight.bits == 4
            self.values = torch_npu.npu_convert_weight_to_int4pack(whole) if packs else whole.to(torch.int8)
            self.scales = weight.scales.t().contiguous().to(weight.dtype)
            self.offsets = torch.zeros_like(self.scales)
            if weight.zeros is not None:
                self.offsets = (middle - weight.zeros.t().contiguous().to(weight.dtype)).contiguous()
            self.group = 0 if weight.group == weight.shape[1] else weight.group
            self.order = weight.order
        half = weight.dtype == torch.float16
        self.bias = None if bias is None else bias.to(torch.float16 if half else torch.float32)

    def __call__(self, x: Tensor) -> Tensor:
        if self.order is not None:
            x = x.index_select(1, self.order)
        result: Tensor = torch_npu.npu_weight_quant_batchmatmul(
            x, self.values, self.scales, self.offsets, bias=self.bias, antiquant_group_size=self.group
        )
        return result
