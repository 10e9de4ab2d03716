"""RMS norms, computed in float32, with results in the input's dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.devices.npu_simulator.constraints import dtypes, require, same_dtype
from kernels.devices.npu_simulator.operators.reference import reference

__all__: list[str] = []

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def norm_rules(operator: str, x: Tensor, gamma: Tensor) -> None:
    """Vendor: dtypes of the three floats, gamma like the input ("no fp32-gamma variant"), 1 to 8 dims."""
    dtypes(operator, FLOATS, input=x, gamma=gamma)
    same_dtype(operator, input=x, gamma=gamma)
    require(
        gamma.dim() >= 1 and x.shape[x.dim() - gamma.dim() :] == gamma.shape,
        *(operator, "gamma", f"shape {tuple(gamma.shape)} must be the last of the input's {tuple(x.shape)}"),
    )
    require(x.dim() <= 8, operator, "input", f"has {x.dim()} dimensions, 8 is the most")


def normed(x: Tensor, gamma: Tensor, epsilon: float, one_more: bool = False) -> tuple[Tensor, Tensor]:
    """The norm over gamma's dimensions, and the reciprocal deviation [..., 1 for each of them]."""
    wide = x.float()
    over = tuple(range(-gamma.dim(), 0))
    rstd = torch.rsqrt(wide.pow(2).mean(over, keepdim=True) + epsilon)
    weight = gamma.float() + 1 if one_more else gamma.float()
    return (wide * rstd * weight).to(x.dtype), rstd


def rms_norm_rules(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> None:
    norm_rules("npu_rms_norm", input, gamma)


@reference("npu_rms_norm", rules=rms_norm_rules)
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    return normed(input, gamma, epsilon)


def gemma_rules(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> None:
    norm_rules("npu_gemma_rms_norm", input, gamma)


@reference("npu_gemma_rms_norm", rules=gemma_rules)
def npu_gemma_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    return normed(input, gamma, epsilon, one_more=True)


def add_rules(operator: str, x1: Tensor, x2: Tensor, gamma: Tensor) -> None:
    norm_rules(operator, x1, gamma)
    same_dtype(operator, x1=x1, x2=x2)
    require(x1.shape == x2.shape, operator, "x2", f"shape {tuple(x2.shape)} must be x1's {tuple(x1.shape)}")


def add_norm_rules(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> None:
    add_rules("npu_add_rms_norm", x1, x2, gamma)


@reference("npu_add_rms_norm", rules=add_norm_rules)
def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """(norm, reciprocal deviation, x1 + x2): the residual is the third. The norm is that of the sum in x1's dtype."""
    total = x1 + x2
    y, rstd = normed(total, gamma, epsilon)
    return y, rstd, total


def add_norm_v2_rules(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> None:
    add_rules("npu_add_rms_norm_v2", x1, x2, gamma)


@reference("npu_add_rms_norm_v2", rules=add_norm_v2_rules)
def npu_add_rms_norm_v2(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Tensor:
    """In place: x1 becomes the norm, x2 the sum; returns the reciprocal deviation only."""
    total = x1 + x2
    y, rstd = normed(total, gamma, epsilon)
    x1.copy_(y)
    x2.copy_(total)
    return rstd
