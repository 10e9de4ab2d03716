"""Dynamic quantization and integer matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.devices.npu_simulator.constraints import contiguous, dtypes, require
from kernels.devices.npu_simulator.operators.microscaling import E4M3, mx_product, mx_rules
from kernels.devices.npu_simulator.operators.reference import reference
from kernels.weights.quantization.int8 import exact_products

__all__ = ["quantize_tokens"]

MAX_DIM = 65535
_HALVES = (torch.float16, torch.bfloat16)
_OUT = {5: torch.float16, 15: torch.bfloat16}
"""``output_dtype``, by PyTorch's numbers of dtypes."""


def quantize_tokens(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """int8 of the tokens' shape, and what each token was divided by, float32 without the last dimension."""
    wide = tokens.float()
    scales = wide.abs().amax(-1) / 127
    whole = torch.where(scales[..., None] > 0, wide / scales[..., None], 0.0).round().clamp(-128, 127)
    return whole.to(torch.int8), scales


def dynamic_quant_rules(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> None:
    """Vendor: 16 bit floats of two dimensions or more. Simulated is only int8 with a scale by token."""
    name = "npu_dynamic_quant"
    dtypes(name, _HALVES, input=input)
    require(input.dim() >= 2, name, "input", f"must have two dimensions or more, has {input.dim()}")
    for argument, value in (("smooth_scales", smooth_scales), ("group_index", group_index)):
        require(value is None, name, argument, "is not simulated: leave it out")
    require(dst_type in (None, 1), name, "dst_type", f"{dst_type} is not simulated: int8 alone is")
    require(quant_mode == "pertoken", name, "quant_mode", f"{quant_mode!r} is not simulated: pertoken alone is")
    require(dst_type_max == 0.0, name, "dst_type_max", "is not simulated: leave it out")


@reference("npu_dynamic_quant", rules=dynamic_quant_rules)
def npu_dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """int8 of the input's shape, and float32 scales without its last dimension."""
    return quantize_tokens(input)


def quant_matmul_rules(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: list[int] | None = None,
    y_scale: Tensor | None = None,
) -> None:
    """Documented: int8 [M, K] by [K, N], dimensions of up to 65535; a scale for each output or for all. With
    ``pertoken_scale`` a bias is floating or integer, without it integer, and an output in float16 takes its scale as
    int64 (npu_trans_quant_param). Or e4m3 by e4m3 with scales of blocks of 32 inputs, for which a bias is reported to
    be wrong."""
    name = "npu_quant_matmul"
    if x1.dtype == E4M3:
        for argument, value in (
            ("offset", offset),
            ("x1_dtype", x1_dtype),
            ("x2_dtype", x2_dtype),
            ("y_scale", y_scale),
        ):
            require(value is None, name, argument, "is not simulated: leave it out")
        token_scales = ("pertoken_scale", pertoken_scale, pertoken_scale_dtype)
        mx_rules(name, x1, x2, ("scale", scale, scale_dtype), token_scales)
        require(x2.dim() == 2, name, "x2", f"must be [K, N], has shape {tuple(x2.shape)}")
        require(group_sizes == [1, 1, 32], name, "group_sizes", f"must be [1, 1, 32], is {group_sizes}")
        require(bias is None, name, "bias", "with e4m3 is reported to be added wrongly: add it afterwards")
        require(output_dtype in _OUT, name, "output_dtype", f"{output_dtype} is not simulated: float16 or bfloat16 are")
        return
    for argument, unused in (
        ("offset", offset),
        ("x1_dtype", x1_dtype),
        ("x2_dtype", x2_dtype),
        ("pertoken_scale_dtype", pertoken_scale_dtype),
        ("scale_dtype", scale_dtype),
        ("group_sizes", group_sizes),
        ("y_scale", y_scale),
    ):
        require(unused is None, name, argument, "is not simulated: leave it out")
    dtypes(name, (torch.int8,), x1=x1, x2=x2)
    contiguous(name, x1=x1)
    require(x1.dim() == 2, name, "x1", f"must be [M, K], has shape {tuple(x1.shape)} (flatten the tokens)")
    fits = x2.dim() == 2 and x2.shape[0] == x1.shape[1]
    require(fits, name, "x2", f"must be [{x1.shape[1]}, N], has shape {tuple(x2.shape)}")
    for argument, tensor in (("x1", x1), ("x2", x2)):
        large = f"has a dimension above {MAX_DIM}: {tuple(tensor.shape)}"
        require(max(tensor.shape[-1], x2.shape[0]) <= MAX_DIM, name, argument, large)
    outputs = x2.shape[1]
    require(tuple(scale.shape) in ((outputs,), (1,)), name, "scale", f"must be [{outputs}], is {tuple(scale.shape)}")
    require(output_dtype in _OUT, name, "output_dtype", f"{output_dtype} is not simulated: float16 or bfloat16 are")
    if bias is not None:
        require(tuple(bias.shape) == (outputs,), name, "bias", f"must be [{outputs}], is {tuple(bias.shape)}")
    if pertoken_scale is None:
        half = output_dtype is not None and _OUT[output_dtype] == torch.float16
        dtypes(name, (torch.int64,) if half else (torch.float32, torch.bfloat16), scale=scale)
        require(not half, name, "scale", "of int64 is not simulated: compute in bfloat16")
        dtypes(name, (torch.int32,), bias=bias)
        return
    dtypes(name, (torch.float32, torch.bfloat16), scale=scale)
    dtypes(name, (torch.float32,), pertoken_scale=pertoken_scale)
    dtypes(name, (torch.float32, torch.int32, *_HALVES), bias=bias)
    tokens = f"must be [{x1.shape[0]}], one per token, has shape {tuple(pertoken_scale.shape)}"
    require(tuple(pertoken_scale.shape) == (x1.shape[0],), name, "pertoken_scale", tokens)


@reference("npu_quant_matmul", rules=quant_matmul_rules)
def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: list[int] | None = None,
    y_scale: Tensor | None = None,
) -> Tensor:
    """Exact integer sums; integer biases are added before scaling, others after."""
    assert output_dtype is not None
    if x1.dtype == E4M3:
        assert pertoken_scale is not None
        return mx_product(x1, pertoken_scale, x2, scale).to(_OUT[output_dtype])
    sums = exact_products(x1, x2)
    if bias is not None and bias.dtype == torch.int32:
        sums = sums + bias
    out = sums.float() * scale.float()
    if pertoken_scale is not None:
        out = out * pertoken_scale[:, None]
    if bias is not None and bias.dtype != torch.int32:
        out = out + bias.float()
    return out.to(_OUT[output_dtype])
