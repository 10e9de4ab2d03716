"""Layers whose weights are divided over the ranks of a group. A layer split by its outputs is the platform's own."""

from __future__ import annotations

from torch import Tensor

from kernels.parallel.group import Group
from kernels.platforms.base import Platform
from kernels.platforms.operators import Linear, Lookup
from kernels.platforms.projections import TableLookup
from kernels.quantization.weights import Projection

__all__ = ["VocabularyEmbedding", "VocabularyHead", "row_parallel"]


def row_parallel(platform: Platform, group: Group, weight: Projection, bias: Tensor | None) -> Linear:
    """``x @ weight.T + bias`` where each rank has its columns of ``weight`` and its part of ``x``'s last dimension.

    The result is whole on every rank.
    """
    linear = platform.make_projection(weight, bias if group.rank == 0 else None)  # the sum holds it once
    return linear if group.size == 1 else lambda x: group.all_reduce(linear(x))


class VocabularyEmbedding:
    """Rows of a table, of which each rank has ``size``: ``lookup`` finds these, as ``Platform.embed`` does."""

    def __init__(self, group: Group, lookup: Lookup, size: int) -> None:
        self.group = group
        self.lookup = lookup
        self.size = size
        self.first = group.rank * size

    @property
    def table(self) -> Tensor | None:
        """[vocab, hidden] where it is dense and whole, for kernels that look up themselves."""
        return self.lookup.table if self.group.size == 1 and isinstance(self.lookup, TableLookup) else None

    def __call__(self, ids: Tensor) -> Tensor:
        """``ids`` int [tokens] -> [tokens, hidden], whole on every rank."""
        if self.group.size == 1:
            return self.lookup(ids)
        row = ids - self.first
        elsewhere = (row < 0) | (row >= self.size)
        found = self.lookup(row.masked_fill(elsewhere, 0))
        return self.group.all_reduce(found.masked_fill(elsewhere.unsqueeze(1), 0))


class VocabularyHead:
    """Logits of the whole vocabulary on every rank, each rank having computed its own part of them.

    They are the same bits everywhere, and noise is a function of seed, position and token alone, so every rank samples
    the same tokens by itself: they need not be told, and each rank's next step finds them on its own device.
    """

    def __init__(self, group: Group, linear: Linear) -> None:
        self.group = group
        self.linear = linear

    def __call__(self, hidden: Tensor) -> Tensor:
        """``hidden`` [rows, hidden] -> [rows, vocab] in the dtype that ``linear`` gives."""
        return self.group.all_gather(self.linear(hidden))
