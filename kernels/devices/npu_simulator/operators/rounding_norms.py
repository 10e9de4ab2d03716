"""Norms of sums that are rounded to eight bits in the same kernel: the sum in the inputs' dtype, its norm
in float32, which is rounded from there."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.devices.npu_simulator.constraints import dtypes, require
from kernels.devices.npu_simulator.operators.microscaling import mx_quant_rules, npu_dynamic_mx_quant
from kernels.devices.npu_simulator.operators.norms import add_rules, normed
from kernels.devices.npu_simulator.operators.reference import reference

__all__: list[str] = []

_HALVES = (torch.float16, torch.bfloat16)
_BEFORE_A5 = ("A2", "A3")


def _rules(name: str, x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor | None, unused: dict[str, object]) -> None:
    """Vendor: 16 bit floats, gamma and beta of one dimension and of the inputs' dtype."""
    dtypes(name, _HALVES, x1=x1)
    add_rules(name, x1, x2, gamma)
    require(gamma.dim() == 1, name, "gamma", f"must have one dimension, has {gamma.dim()}")
    if beta is not None:
        dtypes(name, (x1.dtype,), beta=beta)
        require(beta.shape == gamma.shape, name, "beta", f"must be {list(gamma.shape)}, is {list(beta.shape)}")
    for argument, value in unused.items():
        require(value is None, name, argument, "is not simulated: leave it out")


def _normed(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm in float32, the reciprocal deviation, and the sum."""
    total = x1 + x2
    y, rstd = normed(total.float(), gamma.float(), epsilon)
    return y if beta is None else y + beta.float(), rstd, total


def dynamic_rules(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    *,
    smooth_scale1: Tensor | None = None,
    smooth_scale2: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-6,
    output_mask: list[bool] | None = None,
    y_dtype: int | None = None,
) -> None:
    """Vendor: two dimensions or more. Of its forms that of one result in int8 is simulated."""
    name = "npu_add_rms_norm_dynamic_quant"
    unused = {"smooth_scale1": smooth_scale1, "smooth_scale2": smooth_scale2, "output_mask": output_mask}
    _rules(name, x1, x2, gamma, beta, unused | {"y_dtype": y_dtype})
    require(x1.dim() >= 2, name, "x1", f"must have two dimensions or more, has {x1.dim()}")


@reference("npu_add_rms_norm_dynamic_quant", rules=dynamic_rules, generations=_BEFORE_A5)
def npu_add_rms_norm_dynamic_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    *,
    smooth_scale1: Tensor | None = None,
    smooth_scale2: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-6,
    output_mask: list[bool] | None = None,
    y_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(int8, nothing, x1 + x2, a float32 scale for each token, nothing)"""
    y, _, total = _normed(x1, x2, gamma, beta, epsilon)
    scales = y.abs().amax(-1) / 127
    whole = torch.where(scales[..., None] > 0, y / scales[..., None], 0.0).round().clamp(-128, 127)
    return whole.to(torch.int8), torch.empty(0, dtype=torch.int8), total, scales, torch.empty(0)


def static_rules(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    scales1: Tensor,
    zero_points1: Tensor | None,
    beta: Tensor | None = None,
    scales2: Tensor | None = None,
    zero_points2: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-6,
    div_mode: bool = True,
    dst_type: int | None = None,
) -> None:
    """Vendor, for A2 and A3: scales in float32 and zero points in int32 beside float16, both in bfloat16 beside
    bfloat16, of gamma's shape; the last dimension. Its fusing of graphs takes rows of a multiple of 32 bytes alone. Of
    its forms the one that divides by the scales, and has one result in int8, is simulated."""
    name = "npu_add_rms_norm_quant"
    unused: dict[str, object] = {"scales2": scales2, "zero_points2": zero_points2, "dst_type": dst_type}
    _rules(name, x1, x2, gamma, beta, unused)
    half = x1.dtype == torch.bfloat16
    dtypes(name, (torch.bfloat16 if half else torch.float32,), scales1=scales1)
    dtypes(name, (torch.bfloat16 if half else torch.int32,), zero_points1=zero_points1)
    for argument, tensor in (("scales1", scales1), ("zero_points1", zero_points1)):
        fits = tensor is None or tensor.shape == gamma.shape
        require(fits, name, argument, f"must be {list(gamma.shape)}, one an input")
    require(axis == -1, name, "axis", f"must be -1, is {axis}")
    aligned = x1.shape[-1] * x1.itemsize % 32 == 0
    require(aligned, name, "x1", f"must have rows of a multiple of 32 bytes, has {x1.shape[-1]} of {x1.itemsize}")
    require(div_mode, name, "div_mode", "False is not simulated: leave it out, and give what is divided by")


@reference("npu_add_rms_norm_quant", rules=static_rules, generations=_BEFORE_A5)
def npu_add_rms_norm_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    scales1: Tensor,
    zero_points1: Tensor | None,
    beta: Tensor | None = None,
    scales2: Tensor | None = None,
    zero_points2: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-6,
    div_mode: bool = True,
    dst_type: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(int8, nothing that has a meaning, x1 + x2)"""
    y, _, total = _normed(x1, x2, gamma, beta, epsilon)
    y = y / scales1.float()
    if zero_points1 is not None:
        y = y + zero_points1.float()
    whole = y.round().clamp(-128, 127).to(torch.int8)
    return whole, torch.zeros_like(whole), total


def mx_norm_rules(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    *,
    beta: Tensor | None = None,
    epsilon: float = 1e-6,
    scale_alg: int = 0,
    round_mode: str = "rint",
    dst_type: int = 296,
) -> None:
    """The forms of npu_dynamic_mx_quant that are simulated."""
    _rules("npu_add_rms_norm_dynamic_mx_quant", x1, x2, gamma, beta, {})
    mx_quant_rules(x1, scale_alg=scale_alg, round_mode=round_mode, dst_type=dst_type)


@reference("npu_add_rms_norm_dynamic_mx_quant", rules=mx_norm_rules, generations=("A5",))
def npu_add_rms_norm_dynamic_mx_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    *,
    beta: Tensor | None = None,
    epsilon: float = 1e-6,
    scale_alg: int = 0,
    round_mode: str = "rint",
    dst_type: int = 296,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(e4m3, x1 + x2, e8m0 as uint8 [..., ceil(inputs / 64), 2], reciprocal deviation)"""
    y, rstd, total = _normed(x1, x2, gamma, beta, epsilon)
    rounded, scales = npu_dynamic_mx_quant(y)
    return rounded, total, scales, rstd
