"""Draft models whose tables have a few rows more or fewer than the target's, of the same tokens.

Tables are padded to a multiple of something, and models of one family often differ in it: Qwen2.5's small ones have
151936 rows, its large ones 152064. No tokenizer gives the ids in between.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import pad

from kernels.models.source import ModelSource
from kernels.quantization.weights import Projection, QuantizedWeight

__all__ = ["Padded"]


class Padded:
    """``source``, whose table of embeddings gets zeros up to ``rows``, so that every id of the target has one.

    Where the output layer shares the table (``tied``), it does not get them, and is handed out as if it stood alone:
    a row of zeros would be a guess.
    """

    def __init__(self, source: ModelSource, rows: int, tied: bool) -> None:
        self._source, self._rows, self._tied = source, rows, tied
        self._head: Tensor | None = None

    def take(self, names: Sequence[str]) -> Tensor:
        """As ``TensorSource.take``."""
        return self._source.take(names)

    def biases(self, modules: Sequence[str]) -> Tensor | None:
        """As ``TensorSource.biases``."""
        return self._source.biases(modules)

    def projection(self, modules: Sequence[str]) -> Projection:
        """As ``TensorSource.projection``."""
        if self._tied and list(modules) == ["lm_head"]:
            assert self._head is not None, "the table is taken first"
            return self._head
        return self._source.projection(modules)

    def table(self, module: str) -> Tensor:
        """As ``ModelSource.table``, in floats."""
        found = self._source.table(module)
        if isinstance(found, QuantizedWeight):
            found = found.dequantize(found.dtype)
        whole = pad(found, (0, 0, 0, self._rows - len(found)))
        self._head = whole[: len(found)]
        return whole
