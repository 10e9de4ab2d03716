"""Linear layers whose kernel adds their result to the residual stream, and begins the norm behind it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from kernels.platforms.operators import Norm, Unadded
from kernels.platforms.projections import IntoStream

__all__ = ["CudaIntoStream", "Joins"]


@runtime_checkable
class Joins(Protocol):
    """A linear layer whose kernel can add to the residual stream."""

    def into(self, x: Tensor, residual: Tensor, following: Norm | None) -> tuple[Unadded, Tensor] | None:
        """As ``IntoStream``; None where that is not its kernel's, or no quicker."""
        ...

    def __call__(self, x: Tensor) -> Tensor: ...


class CudaIntoStream(IntoStream):
    """In one launch where the layer's kernel does both."""

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Unadded, Tensor]:
        found = self.linear.into(x, residual, self.following) if isinstance(self.linear, Joins) else None
        return super().__call__(x, residual) if found is None else found
