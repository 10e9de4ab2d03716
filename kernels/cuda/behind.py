"""A linear layer behind a norm, for one token in one launch where that is quicker.

Between two products of one token nothing is left to do but the norm, which waits for the one and lets the other wait.
Where a product's kernel can make the norm itself, both ways are measured once for each shape, while a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from kernels.cuda.choosing import Choices, Shape
from kernels.cuda.norms import Before, CudaNorm
from kernels.platforms.projections import BehindNorm

__all__ = ["CudaBehindNorm", "Fused", "Fuses"]

Fused: TypeAlias = Callable[[], tuple[Tensor, Tensor]]
"""What gives a product of a normed sum, and the sum."""


@runtime_checkable
class Fuses(Protocol):
    """A linear layer that can make the norm before it."""

    @property
    def shape(self) -> Shape:
        """What tells it from others."""
        ...

    def behind(self, x: Tensor, before: Before) -> Mapping[str, Fused]:
        """The ways to do so with ``x`` [1, inputs], by name; none where there are none."""
        ...

    def __call__(self, x: Tensor) -> Tensor: ...


class CudaBehindNorm(BehindNorm):
    """``choices``: what measures."""

    def __init__(self, norm: CudaNorm, linear: Fuses, choices: Choices) -> None:
        super().__init__(norm, linear)
        self._norm, self._linear, self._choices = norm, linear, choices

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        ways = self._ways(x, residual)
        if not ways:
            return super().add(x, residual)
        shape = ("behind a norm", *self._linear.shape, x.dtype)
        name = self._choices.name(shape, lambda: self._trial(x, residual, ways))
        return ways[name]() if name in ways else super().add(x, residual)

    def _ways(self, x: Tensor, residual: Tensor) -> Mapping[str, Fused]:
        if len(x) > 1 or not x.is_contiguous() or not residual.is_contiguous():
            return {}
        return self._linear.behind(x, Before(residual, self._norm.weight, self._norm.eps))

    def _trial(self, x: Tensor, residual: Tensor, ways: Mapping[str, Fused]) -> dict[str, Callable[[], Tensor]]:
        """The ways without traces, each behind a kernel that ends while it starts, as it is in a step."""
        total = x + residual

        def behind(way: Callable[[], Tensor]) -> Tensor:
            self._norm(x)
            return way()

        return {"apart": lambda: behind(lambda: self._linear(self._norm(total)))} | {
            name: partial(behind, partial(lambda way: way()[0], way)) for name, way in ways.items()
        }
