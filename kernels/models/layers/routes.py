"""Records which experts tokens take, and counts the tokens of experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["RouteRecord", "count_tokens"]


class RouteRecord:
    """The experts that the tokens of one pass took, layer by layer. Layers add to it while it is open."""

    def __init__(self) -> None:
        self._taken: list[Tensor] | None = None

    @property
    def is_open(self) -> bool:
        return self._taken is not None

    def open(self) -> None:
        """Begin a pass."""
        self._taken = []

    def add(self, experts: Tensor) -> None:
        """``experts`` int [tokens, chosen] of the next layer."""
        assert self._taken is not None
        self._taken.append(experts)

    def close(self, layers: int, sparse: Sequence[int]) -> Tensor:
        """End the pass: int32 [tokens, layers, chosen], zeros where a layer is not one of the ``sparse`` ones."""
        taken, self._taken = self._taken, None
        assert taken
        result = taken[0].new_zeros((len(taken[0]), layers, taken[0].shape[1]), dtype=torch.int32)
        for layer, experts in zip(sparse, taken, strict=True):
            result[:, layer] = experts
        return result


def count_tokens(experts: Tensor, sparse: Sequence[int], count: int) -> Tensor:
    """The tokens that each of ``count`` experts took, int32 [layers, count], of ``experts`` int [tokens, layers,
    chosen]; zeros in layers that are not one of the ``sparse`` ones."""
    layers = experts.shape[1]
    result = experts.new_zeros((layers, count), dtype=torch.int32)
    for layer in sparse:
        taken = experts[:, layer].reshape(-1).long()
        result[layer].scatter_add_(0, taken, torch.ones_like(taken, dtype=torch.int32))
    return result
