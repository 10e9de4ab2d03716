"""Queries that a learned line of the logarithm of their positions scales, by head (Mistral Large 4; Nakanishi, arXiv
2501.19399).

    q[h] * (scale[h] * ln(position + 1) + bias[h])
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kernels.models.layers.builder import LayerBuilder
from kernels.weights.tensors import Role, Split, TensorSpec

__all__ = ["QueryScale", "tensors"]


def tensors(module: str, heads: int, split: Split | None = None) -> Iterator[TensorSpec]:
    """The numbers of ``heads``. ``split``: how ranks divide these."""
    for part in ("scale", "bias"):
        yield TensorSpec(f"{module}.softmax_scaling.{part}", (heads,), Role.WIDE, split)


class QueryScale:
    """The scale of the queries of ``module``."""

    def __init__(self, builder: LayerBuilder, module: str) -> None:
        self._scale, self._bias = (
            builder.source.take([f"{module}.softmax_scaling.{part}"]).float() for part in ("scale", "bias")
        )

    def __call__(self, queries: Tensor, positions: Tensor) -> Tensor:
        """``queries`` [tokens, heads, dim] at ``positions`` int64 [tokens], scaled."""
        factors = self._scale * positions.float().log1p().unsqueeze(1) + self._bias
        return queries * factors.to(queries.dtype).unsqueeze(2)
