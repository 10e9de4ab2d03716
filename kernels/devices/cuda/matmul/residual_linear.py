"""Linear layers whose kernel adds the result to the residual stream and begins the next norm."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from kernels.core.operators import Norm, PendingResidual
from kernels.devices.linear import ResidualLinear

__all__ = ["CudaResidualLinear", "Joins"]


@runtime_checkable
class Joins(Protocol):
    """A linear layer whose kernel can add to the residual stream."""

    def into(self, x: Tensor, residual: Tensor, following: Norm | None) -> tuple[PendingResidual, Tensor] | None:
        """As ``ResidualLinear``; None if its kernel does not support it or is not faster."""
        ...

    def __call__(self, x: Tensor) -> Tensor: ...


class CudaResidualLinear(ResidualLinear):
    """One launch if the layer's kernel does both."""

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[PendingResidual, Tensor]:
        result = self.linear.into(x, residual, self.next_norm) if isinstance(self.linear, Joins) else None
        return super().__call__(x, residual) if result is None else result
