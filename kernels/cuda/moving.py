"""Keys and values of accepted guesses, brought to the places that follow one another, of all layers in one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.narrow_cache import NarrowCache, bits

__all__ = ["move_caches"]


@triton.jit(do_not_specialize=["each"])
def _move(
    pointers,
    like,
    source,
    target,
    each,
    heads: tl.constexpr,
    dim: tl.constexpr,
    page_size: tl.constexpr,
    token_block: tl.constexpr,
    dim_block: tl.constexpr,
):
    """A row's tokens of one layer and head, keys or values."""
    row, head, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    cache = tl.load(pointers + layer).to(tl.pointer_type(like.dtype.element_ty))
    token = tl.arange(0, token_block)
    at = tl.arange(0, dim_block)
    there = token < each
    begin = tl.load(source + row * each + token, mask=there, other=0)
    end = tl.load(target + row * each + token, mask=there, other=0)
    mask = (there & (begin != end))[:, None] & (at < dim)[None, :]
    old = ((begin // page_size * heads + head) * page_size + begin % page_size) * dim
    new = ((end // page_size * heads + head) * page_size + end % page_size) * dim
    moved = tl.load(cache + old[:, None] + at[None, :], mask=mask)
    tl.debug_barrier()  # all of a row is read before any of it is written
    tl.store(cache + new[:, None] + at[None, :], moved, mask=mask)


def move_caches(
    caches: Sequence[Tensor] | Sequence[NarrowCache],
    source: Tensor,
    target: Tensor,
    each: int,
    put: Callable[[npt.NDArray[np.int64]], Tensor],
) -> None:
    """``caches`` [pages, 2, kv_heads, page_size, dim] of one shape; ``source``, ``target`` int64 [rows * each]."""
    whole = [cache for cache in caches if isinstance(cache, Tensor)]
    narrow = [cache for cache in caches if isinstance(cache, NarrowCache)]
    scales = [cache.scales.unsqueeze(-1) for cache in narrow if cache.scales is not None]
    for parts in (whole, [bits(cache.values) for cache in narrow], scales):
        if parts:
            _move_parts(parts, source, target, each, put)


def _move_parts(
    caches: Sequence[Tensor],
    source: Tensor,
    target: Tensor,
    each: int,
    put: Callable[[npt.NDArray[np.int64]], Tensor],
) -> None:
    _, both, kv_heads, page_size, dim = caches[0].shape
    pointers = put(np.array([cache.data_ptr() for cache in caches], dtype=np.int64))
    _move[(len(source) // each, both * kv_heads, len(caches))](
        pointers,
        caches[0],
        source,
        target,
        each,
        both * kv_heads,
        dim,
        page_size,
        triton.next_power_of_2(each),
        triton.next_power_of_2(dim),
        num_warps=1,
    )
