"""A model's caches on an NPU: in the model's dtype, or in int8."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.contract.caches import Latent
from kernels.contract.errors import UnsupportedError
from kernels.devices.cache import KvCaches
from kernels.devices.latent_cache import IndexedLatent, LatentCache, SplitLatent, make_latent
from kernels.devices.memory import DeviceMemory
from kernels.devices.npu.backends import AttentionBackends
from kernels.devices.npu.features import FEATURES
from kernels.devices.npu.fused_attention import DIMS, LayerCache, causal_mask, check_cache, padded_dim
from kernels.devices.npu.int8_cache import ALIGNMENT, Int8Layer, make_int8_layer
from kernels.devices.npu.latent_attention import PAGE, RANK, ROPE
from kernels.devices.npu.operators import write_cache
from kernels.weights.quantization.cache import CACHE_DTYPES, LayerScales

__all__ = ["InvariantNpuCaches", "NpuCache", "NpuCaches"]

_log = logging.getLogger("troupe.kernels.npu")

_DTYPES = frozenset(CACHE_DTYPES[name] for name in FEATURES.cache_dtypes)
NpuCache = LayerCache | Int8Layer
"""The cache of one layer."""


class NpuCaches(KvCaches[NpuCache]):
    """``page_size``: tokens of a page. ``mask``: the mask of the fused attention, set by ``make``."""

    scale_dtype = torch.float32

    def __init__(self, memory: DeviceMemory, backends: AttentionBackends, page_size: int) -> None:
        super().__init__()
        self._memory = memory
        self._device = memory.torch_device
        self._backends = backends
        self.page_size = page_size
        self.mask: Tensor | None = None

    def make(
        self,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        scales: Sequence[LayerScales] | None = None,
    ) -> list[NpuCache]:
        dim = self.head_dim(head_dim)
        if self._backends.fused:
            check_cache(pages, page_size, kv_heads, dim)
            dtype = torch.bfloat16
            if self.mask is None:
                self.mask = causal_mask(self._device)

        if self.dtype == torch.int8:
            fixed: Sequence[LayerScales | None] = scales or [None] * layers
            return [make_int8_layer(pages, page_size, kv_heads, dim, layer, self._device) for layer in fixed]
        dtype = self.dtype or dtype

        def zeros() -> Tensor:
            return torch.zeros((pages, page_size, kv_heads, dim), dtype=dtype, device=self._device)

        return [LayerCache(zeros(), zeros()) for _ in range(layers)]

    def make_latent(
        self, spec: Latent, pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> LatentCache:
        """Where the fused attention reads latent vectors, in two tensors."""
        if self._backends.fused and self.mask is None:
            self.mask = causal_mask(self._device)
        if not self.plans_latent(spec, page_size, dtype):
            return super().make_latent(spec, pages, page_size, dtype, device)
        parts = (make_latent(pages, page_size, size, dtype, device) for size in (RANK, ROPE))
        vectors = SplitLatent(*parts)
        keys = spec.index_dim and make_latent(pages, page_size, spec.index_dim, dtype, device)
        return IndexedLatent(vectors, keys) if isinstance(keys, Tensor) else vectors

    def plans_latent(self, spec: Latent, page_size: int, dtype: torch.dtype) -> bool:
        sizes = (spec.dim, spec.rope_dim, page_size) == (RANK, ROPE, PAGE)
        return self.dtype is None and self._backends.fused and sizes and dtype == torch.bfloat16

    def clear(self, caches: Sequence[NpuCache], pages: list[int]) -> None:
        index = self._memory.put(np.array(pages))
        for cache in caches:
            if isinstance(cache, Int8Layer):
                cache.clear(index)
                continue
            cache.keys.index_fill_(0, index, 0)
            cache.values.index_fill_(0, index, 0)

    def write(self, cache: NpuCache, index: Tensor, keys_values: Tensor) -> None:
        if isinstance(cache, Int8Layer):
            return cache.write(index, keys_values)
        half = keys_values.shape[1] // 2
        write_cache(keys_values[:, :half], keys_values[:, half:], cache.keys, cache.values, index)

    def move(self, cache: NpuCache, source: Tensor, target: Tensor) -> None:
        if isinstance(cache, Int8Layer):
            return cache.move(source, target)
        for part in (cache.keys, cache.values):
            tokens = part.view(-1, *part.shape[2:])
            tokens.index_copy_(0, target, tokens.index_select(0, source))

    def gather(self, cache: NpuCache, places: Tensor) -> Tensor:
        """The contents of ``places`` int64 [n]: [n, 2, kv_heads, dim], float32 if the cache is int8."""
        if isinstance(cache, Int8Layer):
            return cache.gather(places)
        parts = (part.view(-1, *part.shape[2:]).index_select(0, places) for part in (cache.keys, cache.values))
        return torch.stack(tuple(parts), 1)

    def kv_heads(self, cache: NpuCache) -> int:
        """Key heads of a cache."""
        return cache.keys.shape[2]

    def head_dim(self, dim: int) -> int:
        wide = padded_dim(dim) if self._backends.fused and dim <= DIMS[-1] else dim
        return -(-dim // ALIGNMENT) * ALIGNMENT if self.dtype == torch.int8 else wide

    def check_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in _DTYPES:
            raise UnsupportedError(f"NPUs have no operators for a cache in {dtype}; use --kv-cache-dtype int8")
        if dtype == torch.int8:
            _log.warning(
                "The fused attention reads an int8 cache for decodes only; for prompts, drafts and windows its pages "
                "are converted to bfloat16 first."
            )


class InvariantNpuCaches(NpuCaches):
    """Without int8: no operator quantizes to it independently of the batch."""

    def check_dtype(self, dtype: torch.dtype) -> None:
        super().check_dtype(dtype)
        if dtype == torch.int8:
            raise UnsupportedError(
                "--enable-deterministic-inference has no operator on an NPU that quantizes keys and values to int8: "
                "use --kv-cache-dtype bfloat16"
            )
