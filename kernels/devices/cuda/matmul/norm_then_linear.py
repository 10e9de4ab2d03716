"""A linear layer after a norm, for one token in one launch where that is faster.

Between two products of one token, the norm waits for the first and delays the second. If a product's kernel can compute
the norm itself, both variants are measured once for each shape, at load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from kernels.core.operators import NormInProgress, PendingResidual
from kernels.devices.cuda.elementwise.norms import Before, CudaNorm
from kernels.devices.cuda.matmul.autotune import Choices, Shape, Way, in_a_row
from kernels.devices.cuda.matmul.scaled_residual import ScaledNormThenLinear

__all__ = ["CudaNormThenLinear", "Fused", "Fuses"]

Fused: TypeAlias = Callable[[], tuple[Tensor, Tensor]]
"""Computes the product of a normed sum; returns the product and the sum."""


@runtime_checkable
class Fuses(Protocol):
    """A linear layer that can compute the norm before it."""

    @property
    def shape(self) -> Shape:
        """The key of the layer in autotuning."""
        ...

    def fused_with_norm(self, x: Tensor, before: Before) -> Mapping[str, Fused]:
        """Fused implementations for ``x`` [1, inputs], by name; empty if there are none. Each returns the product and
        the sum."""
        ...

    def copies(self) -> Sequence[Fuses]:
        """Copies of this layer with separate weights, for a trial; as many as fit in memory."""
        ...

    def __call__(self, x: Tensor) -> Tensor: ...


class CudaNormThenLinear(ScaledNormThenLinear):
    """``choices``: measures the implementations."""

    def __init__(self, norm: CudaNorm, linear: Fuses, choices: Choices) -> None:
        super().__init__(norm, linear)
        self._norm, self._linear, self._choices = norm, linear, choices

    def add(self, x: PendingResidual, residual: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(x, NormInProgress):
            return super().add(x, residual)
        name = self.quickest(x, residual)
        return super().add(x, residual) if name is None else self._ways(self._linear, x, residual)[name]()

    def quickest(self, x: Tensor | None, residual: Tensor) -> str | None:
        """The name of the fused implementation to use; None for separate launches. ``x``: None if nothing remains to be
        added."""
        ways = self._ways(self._linear, x, residual)
        if not ways:
            return None
        if x is None and len(ways) == 1:
            return next(iter(ways))  # quicker than a launch more, by what was measured
        shape = ("behind a norm" if x is not None else "norm", *self._linear.shape, residual.dtype)
        name = self._choices.name(shape, lambda: self._trial(x, residual))
        return name if name in ways else None

    def before(self, residual: Tensor | None) -> Before:
        """The norm as argument of the fused kernel."""
        return Before(residual, self._norm.weight, self._norm.eps)

    def _ways(self, linear: Fuses, x: Tensor | None, residual: Tensor) -> Mapping[str, Fused]:
        if len(residual) > 1 or not residual.is_contiguous() or (x is not None and not x.is_contiguous()):
            return {}
        return (
            linear.fused_with_norm(residual, self.before(None))
            if x is None
            else linear.fused_with_norm(x, self.before(residual))
        )

    def _trial(self, x: Tensor | None, residual: Tensor) -> dict[str, Way]:
        """The ways without traces."""
        total = residual if x is None else x + residual

        def ways(linear: Fuses) -> dict[str, Way]:
            fused = self._ways(linear, x, residual)
            return {"apart": lambda: linear(self._norm(total))} | {
                name: partial(lambda way: way()[0], way) for name, way in fused.items()
            }

        return in_a_row([ways(linear) for linear in (self._linear, *self._linear.copies())], lambda: None)
