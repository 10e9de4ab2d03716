"""A model's caches on the CPU: one layer's is one tensor [pages, page_size, 2, kv_heads, head_dim], or in fewer bits
``NarrowPages``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu.attention import AttentionPlan, native_attention, paged_attention
from kernels.cpu.large_pages import zeros
from kernels.cpu.narrow_cache import NarrowPages, NarrowPlan
from kernels.cpu.operators import Native
from kernels.quantization.cache import LayerScales, narrow

__all__ = ["attend", "clear_pages", "gather_tokens", "make_caches", "make_narrow_caches", "move_tokens", "write_tokens"]


def make_caches(layers: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [zeros(shape, dtype) for _ in range(layers)]


def make_narrow_caches(
    layers: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    scales: Sequence[LayerScales] | None,
) -> list[NarrowPages]:
    """``scales``: each layer's, fixed; None: each token's own, of ``scale_dtype``, where ``dtype`` has 8 bits."""
    fixed: Sequence[LayerScales | None] = scales or [None] * layers
    return [
        NarrowPages(
            zeros(shape, dtype),
            zeros(shape[:-1], scale_dtype) if narrow(dtype) and layer is None else None,
            layer,
        )
        for layer in fixed
    ]


def clear_pages(caches: list[Tensor] | list[NarrowPages], pages: list[int]) -> None:
    for cache in caches:
        if isinstance(cache, NarrowPages):
            cache.clear(pages)
        else:
            cache[pages] = 0


def write_tokens(cache: Tensor | NarrowPages, index: Tensor, keys_values: Tensor, native: Native | None) -> None:
    """``keys_values`` [tokens, 2 * kv_heads, dim] to ``index`` int64 [tokens], by ``native`` operators or torch's."""
    if isinstance(cache, NarrowPages):
        cache.write(index, keys_values, native)
    elif native is not None:
        native.write(cache, index, keys_values)
    else:
        cache.view(-1, *keys_values.shape[1:]).index_copy_(0, index, keys_values)


def move_tokens(cache: Tensor | NarrowPages, source: Tensor, target: Tensor) -> None:
    """From places ``source`` to ``target`` int64 [tokens]."""
    if isinstance(cache, NarrowPages):
        return cache.move(source, target)
    tokens = cache.view(-1, *cache.shape[2:])
    tokens.index_copy_(0, target, tokens.index_select(0, source))


def gather_tokens(cache: Tensor | NarrowPages, places: Tensor) -> Tensor:
    """What ``places`` int64 [n] hold: [n, 2, kv_heads, dim], float32 where the cache has 8 bits."""
    if isinstance(cache, NarrowPages):
        return cache.widened_tokens(places)
    return cache.view(-1, *cache.shape[2:]).index_select(0, places)


def attend(
    queries: Tensor, cache: Tensor | NarrowPages, plan: AttentionPlan | NarrowPlan, scale: float, native: Native | None
) -> Tensor:
    """``queries`` [tokens, heads, dim] -> [tokens, heads * dim], by whoever the plan is for."""
    if isinstance(plan, NarrowPlan):
        assert isinstance(cache, NarrowPages)
        over_pages, pages = plan.over_pages
        return paged_attention(queries, cache.widened(pages, queries.dtype), over_pages, scale)
    if native is None:
        assert isinstance(cache, Tensor)
        return paged_attention(queries, cache, plan, scale)
    kept = cache.kept if isinstance(cache, NarrowPages) else cache
    assert kept is not None
    return native_attention(queries, kept, plan, scale, native)
