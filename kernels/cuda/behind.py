"""A linear layer behind a norm, for one token in one launch where that is quicker.

Between two products of one token nothing is left to do but the norm, which waits for the one and lets the other wait.
Where a product's kernel can make the norm itself, both ways are measured once for each shape, while a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from kernels.cuda.choosing import Choices, Shape, Way, in_a_row
from kernels.cuda.norms import Before, CudaNorm
from kernels.cuda.scaled import BehindScaled
from kernels.platforms.operators import Begun, Unadded

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
        """The ways to do so with ``x`` [1, inputs], by name; none where there are none. Each gives the product and the
        sum."""
        ...

    def copies(self) -> Sequence[Fuses]:
        """Layers like this, with weights of their own, to try it; as many as there is memory for."""
        ...

    def __call__(self, x: Tensor) -> Tensor: ...


class CudaBehindNorm(BehindScaled):
    """``choices``: what measures."""

    def __init__(self, norm: CudaNorm, linear: Fuses, choices: Choices) -> None:
        super().__init__(norm, linear)
        self._norm, self._linear, self._choices = norm, linear, choices

    def add(self, x: Unadded, residual: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(x, Begun):
            return super().add(x, residual)
        name = self.quickest(x, residual)
        return super().add(x, residual) if name is None else self._ways(self._linear, x, residual)[name]()

    def quickest(self, x: Tensor | None, residual: Tensor) -> str | None:
        """The way that makes both, by name; None where each has a launch of its own. ``x``: None where there is nothing
        to add any more."""
        ways = self._ways(self._linear, x, residual)
        if not ways:
            return None
        if x is None and len(ways) == 1:
            return next(iter(ways))  # quicker than a launch more, by what was measured
        shape = ("behind a norm" if x is not None else "norm", *self._linear.shape, residual.dtype)
        name = self._choices.name(shape, lambda: self._trial(x, residual))
        return name if name in ways else None

    def before(self, residual: Tensor | None) -> Before:
        """What the kernel of both is told of the norm."""
        return Before(residual, self._norm.weight, self._norm.eps)

    def _ways(self, linear: Fuses, x: Tensor | None, residual: Tensor) -> Mapping[str, Fused]:
        if len(residual) > 1 or not residual.is_contiguous() or (x is not None and not x.is_contiguous()):
            return {}
        return linear.behind(residual, self.before(None)) if x is None else linear.behind(x, self.before(residual))

    def _trial(self, x: Tensor | None, residual: Tensor) -> dict[str, Way]:
        """The ways without traces."""
        total = residual if x is None else x + residual

        def ways(linear: Fuses) -> dict[str, Way]:
            fused = self._ways(linear, x, residual)
            return {"apart": lambda: linear(self._norm(total))} | {
                name: partial(lambda way: way()[0], way) for name, way in fused.items()
            }

        return in_a_row([ways(linear) for linear in (self._linear, *self._linear.copies())], lambda: None)
