"""Queries, keys and values of new tokens, from the residual stream to where attention reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from kernels.platforms.operators import Norm, Unadded
from kernels.platforms.projections import BehindNorm

if TYPE_CHECKING:
    from kernels.platforms.base import Platform

__all__ = ["ProjectedHeads"]


class ProjectedHeads:
    """A layer's projection behind a norm, whose heads are placed: see ``Platform.place_heads``. ``norm``: of the
    queries and keys, or none.
    """

    def __init__(
        self, platform: Platform, projection: BehindNorm, heads: int, kv_heads: int, dim: int, norm: Norm | None
    ) -> None:
        self.platform, self.projection = platform, projection
        self.heads, self.kv_heads, self.dim, self.norm = heads, kv_heads, dim, norm

    def __call__(
        self, x: Unadded, residual: Tensor, cos: Tensor, sin: Tensor, cache: Any, index: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``x``: what is still to be added to ``residual``. -> the queries [tokens, heads, dim] and the sum. May
        overwrite both inputs."""
        projected, total = self.projection.add(x, residual)
        qkv = projected.view(-1, self.heads + 2 * self.kv_heads, self.dim)
        return self.platform.place_heads(qkv, self.heads, self.norm, cos, sin, cache, index), total
