"""A model's caches on an NVIDIA GPU: for each layer one tensor [pages, 2, kv_heads, page_size, head_dim], or a
quantized ``Cache8bit``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from kernels.contract.errors import UnsupportedError
from kernels.devices.cache import KvCaches
from kernels.devices.cuda.attention.cache_8bit import Cache8bit
from kernels.devices.cuda.attention.moving import move_caches
from kernels.devices.memory import DeviceMemory
from kernels.weights.quantization.cache import LayerScales, narrow

__all__ = ["CudaCache", "CudaCaches"]

CudaCache = Tensor | Cache8bit
"""The cache of one layer."""

_PAGE_SIZES = (16, 32, 64, 128, 256)


class CudaCaches(KvCaches[CudaCache]):
    """Makes and writes caches. ``kv_heads``: of the caches made last. ``name``: the device's name."""

    def __init__(self, memory: DeviceMemory, name: str) -> None:
        super().__init__()
        self._device = memory.torch_device
        self._put: Callable[[npt.NDArray[Any]], Tensor] = memory.put
        self._name = name
        self.kv_heads = 1

    def make(
        self,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        scales: Sequence[LayerScales] | None = None,
    ) -> list[CudaCache]:
        if page_size not in _PAGE_SIZES:
            sizes = ", ".join(map(str, _PAGE_SIZES))
            raise UnsupportedError(f"the attention reads pages of {sizes} tokens, not {page_size}; use --page-size 64")
        self.kv_heads, self.page_size = kv_heads, page_size
        shape = (pages, 2, kv_heads, page_size, self.head_dim(head_dim))
        kept = self.dtype

        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        if kept is None:
            return [zeros(shape, dtype) for _ in range(layers)]
        fixed: Sequence[LayerScales | None] = scales or [None] * layers
        return [
            Cache8bit(
                zeros(shape, kept),
                zeros(shape[:-1], self.scale_dtype) if narrow(kept) and layer is None else None,
                layer,
            )
            for layer in fixed
        ]

    def clear(self, caches: Sequence[CudaCache], pages: list[int]) -> None:
        for cache in caches:
            if isinstance(cache, Cache8bit):
                cache.clear(pages)
            else:
                cache[pages] = 0

    def gather(self, cache: CudaCache, places: Tensor) -> Tensor:
        if isinstance(cache, Cache8bit):
            return cache.gather(places)
        page_size = cache.shape[3]
        return cache[torch.div(places, page_size, rounding_mode="floor"), :, :, places % page_size]

    def write(self, cache: CudaCache, index: Tensor, keys_values: Tensor) -> None:
        if isinstance(cache, Cache8bit):
            return cache.write(index, keys_values)
        page_size = cache.shape[3]
        both = keys_values.unflatten(1, (2, -1))
        cache[index // page_size, :, :, index % page_size] = both

    def move(self, cache: CudaCache, source: Tensor, target: Tensor) -> None:
        if isinstance(cache, Cache8bit):
            return cache.move(source, target)
        page_size = cache.shape[3]
        moved = cache[source // page_size, :, :, source % page_size]
        cache[target // page_size, :, :, target % page_size] = moved

    def move_all(self, caches: Sequence[CudaCache], source: Tensor, target: Tensor, each: int) -> None:
        move_caches(caches, source, target, each, self._put)

    def head_dim(self, dim: int) -> int:
        if dim % 2 or dim > 512:
            raise UnsupportedError(f"heads of {dim} are not supported on cuda: up to 512, and even; use --device cpu")
        return dim

    def check_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in (torch.int8, torch.bfloat16) and torch.cuda.get_device_capability(self._device) < (8, 9):
            raise UnsupportedError(
                f"{self._name} does not support fp8, which needs compute capability 8.9 (Ada, Hopper) or later: use "
                "--kv-cache-dtype int8"
            )
