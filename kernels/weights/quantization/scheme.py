"""The contract of a quantization scheme: the tensors that replace a projection's weight, and how they are read.

Each scheme is one file of this package; ``detect_scheme`` selects the one of a checkpoint. For every quantizable tensor
that the model declares, the loader gets the stored tensors from the scheme, compares them with the headers of the
files, and only then lets the scheme read them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.weights.quantization.weights import QuantizedWeight
from kernels.weights.tensors import Tensors, TensorSpec

__all__ = ["AsStored", "Files", "Scheme", "StoredTensor"]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file must store it. ``dtypes``: allowed ones, by their names in safetensors (I8, U8, I32, I64,
    F8_E4M3, F8_E8M0, BF16, F16, F32). ``shapes``: allowed ones, where tools differ; empty: any. ``optional``: may be
    missing. ``kinds``: other last parts of its name. ``rows``: rows of the weight that share a row of it.
    """

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    optional: bool = False
    kinds: tuple[str, ...] = ()
    rows: int = 1


class Files(Protocol):
    """The tensors of a checkpoint."""

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        ...

    def read(self, name: str) -> Tensor:
        """A tensor as it is stored, on the host. Raises LoadError when it is not there."""
        ...


class Scheme(ABC):
    """The scheme of one checkpoint. ``name``: for users, with the sizes (``awq 4 bit, groups of 128``)."""

    name: str

    def adapt(self, tensors: Tensors) -> Tensors:
        """Adapt the tensors that a model declares: add biases that only this checkpoint has, and drop those that it
        stores in other tensors. Raises ConfigError for a checkpoint of another model.
        """
        return tensors

    @abstractmethod
    def tensors(self, weight: TensorSpec) -> dict[str, StoredTensor] | None:
        """The stored tensors, by full name, that replace a quantizable ``weight``; None: the weight is stored in
        floats, as without a scheme. Raises LoadError for a shape that the scheme does not support."""

    @abstractmethod
    def read(self, files: Files, weight: TensorSpec) -> QuantizedWeight | Tensor:
        """The whole weight, on the host; in float32 where no kernel multiplies with what is stored. Called only where
        ``tensors`` returns some."""

    def with_experts(self, dtype: str) -> Scheme:
        """This scheme where files store routed experts as ``dtype``, by its name in safetensors."""
        return self

    def keeps_table(self, table: TensorSpec) -> bool:
        """Whether the table of embeddings is stored quantized and may stay so."""
        return False

    def convert(self, weight: TensorSpec, floats: Tensor) -> QuantizedWeight | None:
        """Quantize a rank's part of a weight that is stored in floats; None: it stays in floats."""
        return None

    def ignores(self, name: str, tensors: Tensors) -> bool:
        """Whether to ignore the stored tensor ``name``, which is none of the model's ``tensors``."""
        return False


class AsStored(Scheme):
    """``scheme``, except for the weights ``floats``, which are stored without it."""

    def __init__(self, scheme: Scheme, floats: frozenset[str]) -> None:
        self.name, self._scheme, self._floats = scheme.name, scheme, floats

    def adapt(self, tensors: Tensors) -> Tensors:
        return self._scheme.adapt(tensors)

    def tensors(self, weight: TensorSpec) -> dict[str, StoredTensor] | None:
        return None if weight.name in self._floats else self._scheme.tensors(weight)

    def read(self, files: Files, weight: TensorSpec) -> QuantizedWeight | Tensor:
        return self._scheme.read(files, weight)

    def keeps_table(self, table: TensorSpec) -> bool:
        return self._scheme.keeps_table(table)

    def convert(self, weight: TensorSpec, floats: Tensor) -> QuantizedWeight | None:
        return self._scheme.convert(weight, floats)

    def ignores(self, name: str, tensors: Tensors) -> bool:
        return self._scheme.ignores(name, tensors)
