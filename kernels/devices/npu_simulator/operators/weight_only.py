"""Products with weights in whole numbers that are made floats of on the way, and inputs rounded by a scale that was
found before."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.devices.npu_simulator.constraints import contiguous, dtypes, require
from kernels.devices.npu_simulator.operators.reference import reference

__all__: list[str] = []

MAX_DIM = 65535
_HALVES = (torch.float16, torch.bfloat16)
_QINT8 = 12
"""PyTorch's own number of torch.qint8."""


def quantize_rules(
    input: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int = 1, div_mode: bool = True
) -> None:
    """Vendor: with ``div_mode`` False scales are multiplied; [K] or [1], of the input's dtype (beside float32 of any),
    zero points of the same shape and dtype. Of its many forms that one is simulated, to qint8."""
    name = "npu_quantize"
    require(not div_mode, name, "div_mode", "True is not simulated: pass False and reciprocal scales")
    require(dtype == _QINT8, name, "dtype", f"{dtype} is not simulated: torch.qint8 alone is")
    require(axis in (-1, input.dim() - 1), name, "axis", f"{axis} is not simulated: the last one alone is")
    dtypes(name, (torch.float32, *_HALVES), input=input)
    dtypes(name, (torch.float32, *_HALVES) if input.dtype == torch.float32 else (input.dtype,), scales=scales)
    wanted = f"must be [{input.shape[-1]}] or [1], is {tuple(scales.shape)}"
    require(tuple(scales.shape) in ((input.shape[-1],), (1,)), name, "scales", wanted)
    if zero_points is not None:
        same = zero_points.shape == scales.shape and zero_points.dtype == scales.dtype
        require(same, name, "zero_points", "must have the scales' shape and dtype")


@reference("npu_quantize", rules=quantize_rules)
def npu_quantize(
    input: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int = 1, div_mode: bool = True
) -> Tensor:
    """int8 of the input's shape."""
    whole = input.float() * scales.float()
    if zero_points is not None:
        whole = whole + zero_points.float()
    return whole.round().clamp(-128, 127).to(torch.int8)


def int4pack_rules(weight: Tensor, inner_k_tiles: int = 0) -> None:
    """Vendor: contiguous int32 of two dimensions, of which 8 divides the last."""
    name = "npu_convert_weight_to_int4pack"
    dtypes(name, (torch.int32,), weight=weight)
    contiguous(name, weight=weight)
    fits = weight.dim() == 2 and weight.shape[1] % 8 == 0
    require(fits, name, "weight", f"must be [k, n] with n divisible by 8, is {tuple(weight.shape)}")
    require(inner_k_tiles == 0, name, "inner_k_tiles", "is reserved: leave it out")


@reference("npu_convert_weight_to_int4pack", rules=int4pack_rules)
def npu_convert_weight_to_int4pack(weight: Tensor, inner_k_tiles: int = 0) -> Tensor:
    """int32 [k, n / 8]. The device's order within a word is its own; here the first column is in the lowest bits."""
    nibbles = (weight.to(torch.int64) & 15).unflatten(1, (-1, 8)) << (4 * torch.arange(8))
    words = nibbles.sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def weight_matmul_rules(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
    weight_dtype: int | None = None,
) -> None:
    """Vendor: x [M, K] of 16 bits; weight [K, N] int8, or int32 of eight int4 along N; scales [N] or [1, N], or with a
    group size (32 to K - 1, divided by 32) [K / group, N], in x's dtype as the offsets; bias float32 with bfloat16."""
    name = "npu_weight_quant_batchmatmul"
    for argument, value in (
        ("quant_scale", quant_scale),
        ("quant_offset", quant_offset),
        ("weight_dtype", weight_dtype),
    ):
        require(value is None, name, argument, "is not simulated: leave it out")
    require(inner_precise == 0, name, "inner_precise", "1 is not simulated")
    dtypes(name, _HALVES, x=x)
    dtypes(name, (torch.int8, torch.int32), weight=weight)
    require(x.dim() == 2 and weight.dim() == 2, name, "x", "and the weight must have two dimensions")
    inputs, outputs = weight.shape[0], weight.shape[1] * (8 if weight.dtype == torch.int32 else 1)
    require(inputs == x.shape[1], name, "weight", f"must be [{x.shape[1]}, N], is {tuple(weight.shape)}")
    require(max(inputs, outputs) <= MAX_DIM, name, "weight", f"has a dimension above {MAX_DIM}")
    if weight.dtype == torch.int32:
        contiguous(name, weight=weight)
    dtypes(name, (x.dtype,), antiquant_scale=antiquant_scale, antiquant_offset=antiquant_offset)
    group = antiquant_group_size
    if group:
        fits = group % 32 == 0 and 32 <= group < inputs
        require(fits, name, "antiquant_group_size", f"{group} must be divisible by 32 and below {inputs}")
        shapes: tuple[tuple[int, ...], ...] = ((-(-inputs // group), outputs),)
    else:
        shapes = ((1, outputs), (outputs,))
    wanted = f"must be {' or '.join(map(str, shapes))}, is {tuple(antiquant_scale.shape)}"
    require(tuple(antiquant_scale.shape) in shapes, name, "antiquant_scale", wanted)
    if antiquant_offset is not None:
        same = antiquant_offset.shape == antiquant_scale.shape
        require(same, name, "antiquant_offset", "must have the scale's shape")
    require(
        antiquant_offset is not None or weight.dtype == torch.int8,
        *(name, "antiquant_offset", "may not be left out for int4: pass zeros"),
    )
    if bias is not None:
        dtypes(name, (torch.float32 if x.dtype == torch.bfloat16 else torch.float16,), bias=bias)
        contiguous(name, bias=bias)
        require(bias.numel() == outputs, name, "bias", f"must be [{outputs}], is {tuple(bias.shape)}")


@reference("npu_weight_quant_batchmatmul", rules=weight_matmul_rules)
def npu_weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
    weight_dtype: int | None = None,
) -> Tensor:
    """``x @ ((weight + offset) * scale) + bias`` in x's dtype, in float32 inside."""
    if weight.dtype == torch.int32:
        nibbles = ((weight[:, :, None] >> (4 * torch.arange(8))) & 15).flatten(1)
        weight = torch.where(nibbles > 7, nibbles - 16, nibbles)

    def wide(values: Tensor) -> Tensor:
        rows = values.float().view(-1, values.shape[-1])
        if not antiquant_group_size:
            return rows
        return rows.repeat_interleave(antiquant_group_size, 0)[: weight.shape[0]]

    floats = weight.float() if antiquant_offset is None else weight.float() + wide(antiquant_offset)
    out = x.float() @ (floats * wide(antiquant_scale))
    return (out if bias is None else out + bias.float()).to(x.dtype)
