"""A scheme: which tensors a checkpoint of its kind stores in place of a projection's weight, and how they are read.

A scheme is one file of this package; ``recognise`` finds the one of a checkpoint. The loader asks it for every
projection (``model.layers.0.self_attn.q_proj``, ``lm_head``), compares what it names with the headers of the files, and
only then has it read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.quantization.weights import QuantizedWeight

__all__ = ["Files", "Scheme", "Shapes", "Stored"]

Shapes = Mapping[str, tuple[int, ...]]
"""Whole tensors by name."""


@dataclass(frozen=True)
class Stored:
    """A tensor as a file must hold it. ``dtypes``: those it may have, by their names in safetensors (I8, U8, I32, I64,
    F8_E4M3, F8_E8M0, BF16, F16, F32). ``shapes``: those it may have, where tools differ. ``optional``: may be missing.
    """

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    optional: bool = False


class Files(Protocol):
    """The tensors of a checkpoint."""

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        ...

    def read(self, name: str) -> Tensor:
        """A tensor as it is stored, on the host. Raises LoadError when it is not there."""
        ...


class Scheme(ABC):
    """One checkpoint's scheme. ``name``: as users know it, with the sizes (``awq 4 bit, groups of 128``)."""

    name: str

    def shapes(self, shapes: Shapes) -> Shapes:
        """The tensors of a model as if there were no scheme -> the same with the biases that its checkpoint has
        besides, and without those that it keeps in other tensors. Raises ConfigError for a checkpoint of another model.
        """
        return shapes

    @abstractmethod
    def tensors(self, module: str, shape: tuple[int, int]) -> dict[str, Stored] | None:
        """What stands for ``module``'s weight [outputs, inputs], by the tensors' whole names; None: ``module.weight``
        in floats, as if there were no scheme. Raises LoadError for a shape that the scheme cannot have."""

    @abstractmethod
    def read(self, files: Files, module: str, shape: tuple[int, int]) -> QuantizedWeight:
        """The whole weight of a module that has ``tensors``, on the host."""

    def keeps_table(self, module: str) -> bool:
        """Whether the table of embeddings is stored quantized and may stay so."""
        return False

    def convert(self, module: str, weight: Tensor) -> QuantizedWeight | None:
        """A rank's part of a weight that is stored in floats, quantized now; None: it stays."""
        return None

    def ignores(self, name: str, shapes: Collection[str]) -> bool:
        """Whether a tensor of a layer that the model does not ask for may be there all the same.

        ``shapes``: the names that it asks for.
        """
        return False
