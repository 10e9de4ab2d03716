"""The paged cache of keys and values, one opaque tensor or object a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from kernels.contract.caches import Latent
from kernels.devices.latent_cache import LatentCache, make_latent_cache
from kernels.weights.quantization.cache import SCALE, LayerScales, narrow

__all__ = ["KvCaches", "distinct"]

Cache = TypeVar("Cache")


class KvCaches(ABC, Generic[Cache]):
    """Makes and writes caches.

    ``dtype``: what keys and values are kept in from now on; None: the model's dtype. ``scale_dtype``: the dtype of a
    token's scale in a cache of 8 bits. ``page_size``: tokens of a page, once caches are made.
    """

    scale_dtype: torch.dtype = SCALE
    page_size: int = 0

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None

    @abstractmethod
    def make(
        self,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        scales: Sequence[LayerScales] | None = None,
    ) -> list[Cache]:
        """Keys and values of every layer, page-major and zeroed: one cache a layer.

        ``dtype``: of the keys and values that are written and of the queries; they are kept in ``self.dtype``, one of
        8 bits by ``scales`` of each layer, or else by one scale for each token and key head.
        """

    @abstractmethod
    def clear(self, caches: Sequence[Cache], pages: list[int]) -> None:
        """Zero these pages in every layer, after a row left numbers in them that are not finite."""

    @abstractmethod
    def write(self, cache: Cache, index: Tensor, keys_values: Tensor) -> None:
        """Write ``keys_values`` [tokens, 2 * kv_heads, dim] (keys first) to ``index`` (page * page_size + offset)."""

    @abstractmethod
    def move(self, cache: Cache, source: Tensor, target: Tensor) -> None:
        """Copy keys and values from ``source`` to ``target`` int64 [tokens] (page * page_size + offset), as if all
        were read before any is written. Targets differ, but for those that are their own source.
        """

    @abstractmethod
    def gather(self, cache: Cache, places: Tensor) -> Tensor:
        """The contents of ``places`` int64 [n]: [n, 2, kv_heads, dim], float32 if the cache has 8 bits."""

    def make_latent(
        self, spec: Latent, pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> LatentCache:
        """One layer's cache of latent vectors, zeroed. ``dtype``: of those that are written and read; they are kept in
        ``self.dtype``."""
        return make_latent_cache(spec, pages, page_size, dtype, device, self.dtype, self.scale_dtype)

    def plans_latent(self, spec: Latent, page_size: int, dtype: torch.dtype) -> bool:
        """Whether kernels read such a cache by the plan of a step (``Attention.plans_latent``)."""
        return self.dtype is None  # kernels read no narrow vectors

    def move_all(self, caches: Sequence[Cache], source: Tensor, target: Tensor, each: int) -> None:
        """``move`` in every layer, of those that share a cache once. ``each``: tokens of a row, whose places no other
        row reads or writes."""
        for cache in distinct(caches):
            self.move(cache, source, target)

    def head_dim(self, dim: int) -> int:
        """The dimension that heads of ``dim`` have in the cache. Raises UnsupportedError."""
        return dim

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raises UnsupportedError when keys and values cannot be kept in ``dtype``."""
        return None

    def token_bytes(self, kv_heads: int, head_dim: int, dtype: torch.dtype, fixed: bool = False) -> int:
        """Bytes of one token's keys and values in one layer. ``dtype``: the model's. ``fixed``: whether scales were
        calibrated beforehand. Raises UnsupportedError."""
        kept = self.dtype or dtype
        scale = self.scale_dtype.itemsize if narrow(kept) and not fixed else 0
        return 2 * kv_heads * (self.head_dim(head_dim) * kept.itemsize + scale)


def distinct(caches: Sequence[Cache]) -> list[Cache]:
    """Each of ``caches`` once, in their order: layers may share one."""
    return list({id(cache): cache for cache in caches}.values())
