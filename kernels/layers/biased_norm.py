"""A norm with a bias, as the step against outliers of ModelSlim leaves it."""

from __future__ import annotations

from torch import Tensor

from kernels.platforms.base import Platform
from kernels.platforms.operators import Norm

__all__ = ["BiasedNorm"]


class BiasedNorm:
    """``norm(x) + bias``, ``bias`` [dim] in the model's dtype. The residual stays without it."""

    def __init__(self, platform: Platform, norm: Norm, bias: Tensor) -> None:
        self.platform = platform
        self.norm = norm
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """As ``Norm``."""
        return self.platform.add_bias(self.norm(x), self.bias)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """As ``Norm.add``."""
        normed, total = self.norm.add(x, residual)
        return self.platform.add_bias(normed, self.bias), total
