"""The contract between a model and the source of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kernels.weights.quantization.weights import Projection, QuantizedWeight

__all__ = ["ModelSource", "TensorSource"]


class TensorSource(Protocol):
    """Where weights come from: new tensors in the model's dtype, on its device."""

    def take(self, names: Sequence[str]) -> Tensor:
        """The named tensors, concatenated along their first dimension."""
        ...

    def biases(self, modules: Sequence[str]) -> Tensor | None:
        """The biases of the named modules, concatenated, with zeros for a module without one; None: none has one."""
        ...

    def projection(self, modules: Sequence[str]) -> Projection:
        """The weights of the named modules, concatenated along outputs; they may be quantized."""
        ...


class ModelSource(TensorSource, Protocol):
    """The weights of a whole model, with its embedding table."""

    def table(self, module: str) -> Tensor | QuantizedWeight:
        """The embedding table, quantized where it is stored so and the device can look up its rows."""
        ...
