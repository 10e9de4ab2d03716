"""Root mean square norm on the CPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["CpuNorm"]


class CpuNorm:
    """``weight * x / sqrt(mean(x^2) + eps)`` in float32, as ``(sqrt(dim) * weight) * x / hypot(|x|, sqrt(dim * eps))``.

    That is half the operators of torch's own, and a small batch costs what its number of operators does.
    ``weight``: [dim], or [heads, dim] with a weight for each head.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        dim = weight.shape[-1]
        self.weight = weight.float() * math.sqrt(dim)
        self.floor = torch.tensor(math.sqrt(dim * eps))

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        size = torch.linalg.vector_norm(wide, 2, -1, True).hypot_(self.floor)
        return torch.div(wide, size).mul_(self.weight).to(x.dtype)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual.add_(x)
        return self(residual), residual
