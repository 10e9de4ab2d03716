"""A residual stream that a product of a few tokens was added to, and how far that kernel came with the norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.cuda.launch import looking_ahead
from kernels.cuda.norms import CudaNorm
from kernels.platforms.operators import Begun, Norm, Unadded
from kernels.platforms.projections import BehindNorm

__all__ = ["ROWS", "BehindScaled", "Divides", "Joining", "Scaled", "scaled_for"]

ROWS = 64
"""Numbers of a token that a program adds up the squares of."""


@dataclass(frozen=True, eq=False)
class Scaled(Begun):
    """A stream whose norm has begun: ``rows`` [tokens, width], its numbers times the gain of ``norm``, rounded, which
    are still to be divided by each token's root mean square; ``squares`` float32 [tokens, width / ROWS, rounded up]:
    sums of squares of the stream, not scaled."""

    norm: CudaNorm
    rows: Tensor
    squares: Tensor

    @classmethod
    def room(cls, norm: CudaNorm, stream: Tensor) -> Scaled:
        """For ``stream`` [tokens, width]; what it holds is to be made."""
        tokens, width = stream.shape
        squares = stream.new_empty((tokens, -(-width // ROWS)), dtype=torch.float32)
        return cls(norm, stream.new_empty((tokens, width)), squares)


@dataclass(frozen=True, eq=False)
class Joining:
    """A product's sum with ``residual`` [tokens, outputs], dense, which it takes the place of; both are rounded.
    ``following``: room for what begins the norm of the sum, or None.
    """

    residual: Tensor
    following: Scaled | None


def scaled_for(norm: Norm, x: Unadded) -> Scaled | None:
    """``x`` where it is what begins ``norm``. In passes that show what is launched some layers are left out, and
    another's norm stands for it."""
    return x if isinstance(x, Scaled) and (x.norm is norm or looking_ahead()) else None


@runtime_checkable
class Divides(Protocol):
    """A linear layer whose kernel can end a norm."""

    def divided(self, x: Scaled) -> Tensor | None:
        """The product of what ``x.norm`` gives; None where that is not its kernel's."""
        ...

    def __call__(self, x: Tensor) -> Tensor: ...


class BehindScaled(BehindNorm):
    """Without a kernel for the norm where the kernels on both sides make it."""

    def add(self, x: Unadded, residual: Tensor) -> tuple[Tensor, Tensor]:
        scaled = scaled_for(self.norm, x)
        if scaled is not None and isinstance(self.linear, Divides):
            found = self.linear.divided(scaled)
            if found is not None:
                return found, residual
        return super().add(x, residual)
