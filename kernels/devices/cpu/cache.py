"""A model's caches on the CPU: one layer's is one tensor [pages, page_size, 2, kv_heads, head_dim], so that one copy
gathers a page's keys and values; or in fewer bits ``Pages8bit``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.contract.caches import Latent
from kernels.devices.cache import KvCaches
from kernels.devices.cpu.cache_8bit import Pages8bit
from kernels.devices.cpu.large_pages import zeros
from kernels.devices.cpu.native_operators import NativeOperators
from kernels.devices.cpu.operators import Native
from kernels.devices.cpu.paged_attention import AttentionPlanner
from kernels.devices.latent_cache import LatentCache
from kernels.weights.quantization.cache import LayerScales, narrow

__all__ = ["CpuCache", "CpuCaches"]

CpuCache = Tensor | Pages8bit
"""One layer's."""


class CpuCaches(KvCaches[CpuCache]):
    """A cache's memory comes from the system zeroed and is taken only as pages are first written.

    ``planner``: of attention over the caches that were made last. ``fits_native``: whether native attention can read
    all caches; one plan serves a model and its draft.
    """

    def __init__(self, native: NativeOperators) -> None:
        super().__init__()
        self._native, self._fitting = native, native.fitting
        self.planner: AttentionPlanner | None = None
        self.fits_native = True

    def make(
        self,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        scales: Sequence[LayerScales] | None = None,
    ) -> list[CpuCache]:
        self.page_size, self.planner = page_size, AttentionPlanner(page_size, dtype)
        self.fits_native &= dtype == torch.bfloat16 and Native.fits_attention(page_size, head_dim)
        shape, kept = (pages, page_size, 2, kv_heads, head_dim), self.dtype
        if kept is None:
            return [zeros(shape, dtype) for _ in range(layers)]
        fixed: Sequence[LayerScales | None] = scales or [None] * layers
        result = [
            Pages8bit(
                zeros(shape, kept),
                zeros(shape[:-1], self.scale_dtype) if narrow(kept) and layer is None else None,
                layer,
            )
            for layer in fixed
        ]
        self.fits_native &= result[0].kept is not None
        return list(result)

    def make_latent(
        self, spec: Latent, pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> LatentCache:
        self.page_size, self.planner = page_size, AttentionPlanner(page_size, dtype)
        return super().make_latent(spec, pages, page_size, dtype, device)

    def plans_latent(self, spec: Latent, page_size: int, dtype: torch.dtype) -> bool:
        native = self._native.current is not None or self._native.building is not None
        fits = Native.fits_latent(page_size, spec.dim + spec.rope_dim, spec.dim) and not spec.index_dim
        return native and fits and dtype == torch.bfloat16 and super().plans_latent(spec, page_size, dtype)

    def clear(self, caches: Sequence[CpuCache], pages: list[int]) -> None:
        for cache in caches:
            if isinstance(cache, Pages8bit):
                cache.clear(pages)
            else:
                cache[pages] = 0

    def write(self, cache: CpuCache, index: Tensor, keys_values: Tensor) -> None:
        native = self._fitting(keys_values.dtype, not isinstance(cache, Pages8bit) or cache.kept is not None)
        if isinstance(cache, Pages8bit):
            cache.write(index, keys_values, native)
        elif native is not None:
            native.write(cache, index, keys_values)
        else:
            cache.view(-1, *keys_values.shape[1:]).index_copy_(0, index, keys_values)

    def move(self, cache: CpuCache, source: Tensor, target: Tensor) -> None:
        if isinstance(cache, Pages8bit):
            return cache.move(source, target)
        tokens = cache.view(-1, *cache.shape[2:])
        tokens.index_copy_(0, target, tokens.index_select(0, source))

    def gather(self, cache: CpuCache, places: Tensor) -> Tensor:
        """The contents of ``places`` int64 [n]: [n, 2, kv_heads, dim], float32 if the cache has 8 bits."""
        if isinstance(cache, Pages8bit):
            return cache.widened_tokens(places)
        return cache.view(-1, *cache.shape[2:]).index_select(0, places)

    def kv_heads(self, cache: CpuCache) -> int:
        """Key heads of a cache."""
        return (cache.values if isinstance(cache, Pages8bit) else cache).shape[3]
