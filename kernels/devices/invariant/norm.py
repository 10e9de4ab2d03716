"""Root mean square norm with one order of sums."""

from __future__ import annotations

from torch import Tensor

from kernels.devices.invariant.elementwise import pairwise_sum

__all__ = ["InvariantNorm"]


class InvariantNorm:
    """``weight * x / sqrt(mean(x^2) + eps)`` in float32. ``weight``: [dim], or [heads, dim]."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight.float()
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        mean = pairwise_sum(wide * wide).mul_(1.0 / x.shape[-1])
        return (wide * mean.add_(self.eps).rsqrt_().unsqueeze(-1)).mul_(self.weight).to(x.dtype)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """As ``Norm.add``."""
        residual = residual.add_(x)
        return self(residual), residual
