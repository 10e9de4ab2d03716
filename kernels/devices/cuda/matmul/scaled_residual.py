"""A residual stream after a product whose kernel has begun the next norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.core.operators import Norm, NormInProgress, PendingResidual
from kernels.devices.cuda.elementwise.norms import CudaNorm
from kernels.devices.cuda.launch import is_precompiling
from kernels.devices.linear import NormThenLinear

__all__ = ["ROWS", "Divides", "Joining", "Scaled", "ScaledNormThenLinear", "scaled_for"]

ROWS = 64
"""Elements of a token whose squares a program sums."""


@dataclass(frozen=True, eq=False)
class Scaled(NormInProgress):
    """A stream whose norm has begun: ``rows`` [tokens, width], its values times the gain of ``norm``, rounded, before
    division by each token's root mean square; ``squares`` float32 [tokens, width / ROWS, rounded up]: sums of squares
    of the stream, not scaled."""

    norm: CudaNorm
    rows: Tensor
    squares: Tensor

    @classmethod
    def room(cls, norm: CudaNorm, stream: Tensor) -> Scaled:
        """Allocate it for ``stream`` [tokens, width], uninitialized."""
        tokens, width = stream.shape
        squares = stream.new_empty((tokens, -(-width // ROWS)), dtype=torch.float32)
        return cls(norm, stream.new_empty((tokens, width)), squares)


@dataclass(frozen=True, eq=False)
class Joining:
    """The addition of a product to ``residual`` [tokens, outputs], contiguous, in place; both are rounded.
    ``following``: memory for the start of the norm of the sum, or None.
    """

    residual: Tensor
    following: Scaled | None


def scaled_for(norm: Norm, x: PendingResidual) -> Scaled | None:
    """``x`` if it is the start of ``norm``, else None. While precompiling some layers are skipped, and another layer's
    norm is accepted."""
    return x if isinstance(x, Scaled) and (x.norm is norm or is_precompiling()) else None


@runtime_checkable
class Divides(Protocol):
    """A linear layer whose kernel can end a norm."""

    def divided(self, x: Scaled) -> Tensor | None:
        """The product of the result of ``x.norm``; None if its kernel does not support it."""
        ...

    def __call__(self, x: Tensor) -> Tensor: ...


class ScaledNormThenLinear(NormThenLinear):
    """A norm without a kernel, if the kernels before and after it compute it."""

    def add(self, x: PendingResidual, residual: Tensor) -> tuple[Tensor, Tensor]:
        scaled = scaled_for(self.norm, x)
        if scaled is not None and isinstance(self.linear, Divides):
            result = self.linear.divided(scaled)
            if result is not None:
                return result, residual
        return super().add(x, residual)
