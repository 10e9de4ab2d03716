"""What stands between products and attention, in float32 inside."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.invariant.elementwise import by_lines

__all__ = ["angles", "rotary", "silu_and_mul", "weighted_sum"]


def angles(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As ``Platform.angles``."""
    turns = positions.to(torch.float32).view(-1, 1, 1) * frequencies
    cos, sin = (by_lines(function, turns) * scale for function in (torch.cos_, torch.sin_))
    return cos.to(dtype), sin.to(dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """As ``Platform.rotary``; the sines of the first half are negated."""
    wide = x.float()
    swapped = wide.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    out.copy_(wide * cos.float() + swapped * sin.float())


def silu_and_mul(x: Tensor) -> Tensor:
    """As ``Projections.silu_and_mul``."""
    half = x.shape[-1] // 2
    gate = by_lines(lambda part: F.silu(part, inplace=True), x[:, :half])
    return (gate * x[:, half:].float()).to(x.dtype)


def weighted_sum(x: Tensor, y: Tensor, logits: Tensor) -> Tensor:
    """As ``Projections.add_weighted``."""
    return (x.float() + y.float() * by_lines(torch.sigmoid_, logits)).to(x.dtype)
