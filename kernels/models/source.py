"""What a model asks its weights of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kernels.quantization.weights import Projection, QuantizedWeight

__all__ = ["ModelSource", "TensorSource"]


class TensorSource(Protocol):
    """Where weights come from: new tensors in the model's dtype, on its device."""

    def take(self, names: Sequence[str]) -> Tensor:
        """The named tensors, one after the other along their first dimension."""
        ...

    def biases(self, modules: Sequence[str]) -> Tensor | None:
        """The biases of the named modules, one after the other, zeros for one that has none; None: none has."""
        ...

    def projection(self, modules: Sequence[str]) -> Projection:
        """The weights of the named modules, one after the other along their outputs, perhaps quantized."""
        ...


class ModelSource(TensorSource, Protocol):
    """Of a whole model."""

    def table(self, module: str) -> Tensor | QuantizedWeight:
        """The weight of which rows are looked up, quantized where it is stored so and may stay."""
        ...
