"""Moves keys and values of accepted draft tokens to consecutive places, in all layers with one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.devices.cache import distinct
from kernels.devices.cuda.attention.cache_8bit import Cache8bit, bits
from kernels.devices.cuda.launch import overlapping

__all__ = ["move_accepted", "move_caches"]


@triton.jit(do_not_specialize=["each"])
def move_kv_kernel(
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
    """Move a row's tokens of one layer and head, keys or values."""
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
    tl.debug_barrier()  # read the whole row before writing any of it
    tl.store(cache + new[:, None] + at[None, :], moved, mask=mask)


@triton.jit(do_not_specialize=["outcome_stride"])
def move_accepted_kv_kernel(
    pointers,
    like,
    index,
    rows,
    outcome,
    outcome_stride,
    levels: tl.constexpr,
    heads: tl.constexpr,
    dim: tl.constexpr,
    page_size: tl.constexpr,
    token_block: tl.constexpr,
    dim_block: tl.constexpr,
    pdl: tl.constexpr,
):
    """The same of the nodes that were accepted."""
    row, head, layer = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    level = tl.arange(0, token_block)
    at = tl.arange(0, dim_block)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    cache = tl.load(pointers + layer).to(tl.pointer_type(like.dtype.element_ty))
    own = outcome + row * outcome_stride
    there = (level < levels) & (level < tl.abs(tl.load(own)))
    first = tl.load(rows + row * 4 + 3)
    node = tl.load(own + 2 + level, mask=there, other=0)
    begin = tl.load(index + first + node, mask=there, other=0)
    end = tl.load(index + first + level, mask=there, other=0)
    mask = (there & (begin != end))[:, None] & (at < dim)[None, :]
    old = ((begin // page_size * heads + head) * page_size + begin % page_size) * dim
    new = ((end // page_size * heads + head) * page_size + end % page_size) * dim
    moved = tl.load(cache + old[:, None] + at[None, :], mask=mask)
    tl.debug_barrier()  # read the whole row before writing any of it
    tl.store(cache + new[:, None] + at[None, :], moved, mask=mask)


def move_caches(
    caches: Sequence[Tensor | Cache8bit],
    source: Tensor,
    target: Tensor,
    each: int,
    put: Callable[[npt.NDArray[np.int64]], Tensor],
) -> None:
    """``caches`` [pages, 2, kv_heads, page_size, dim]; ``source``, ``target`` int64 [rows * each]."""
    for parts in _kinds(caches):
        _move_parts(parts, source, target, each, put)


def move_accepted(
    caches: Sequence[Tensor | Cache8bit],
    index: Tensor,
    rows: Tensor,
    outcome: Tensor,
    pointers: Callable[[Sequence[Tensor]], Tensor],
) -> None:
    """``DraftKernels.move_accepted``. ``pointers``: makes int64 [caches], the addresses of the caches."""
    pdl = overlapping(index.device)
    for parts in _kinds(caches):
        _, both, kv_heads, page_size, dim = parts[0].shape
        levels = outcome.shape[1] - 2
        move_accepted_kv_kernel[(len(outcome), both * kv_heads, len(parts))](
            pointers(parts),
            parts[0],
            index,
            rows,
            outcome,
            outcome.stride(0),
            levels,
            both * kv_heads,
            dim,
            page_size,
            triton.next_power_of_2(levels),
            triton.next_power_of_2(dim),
            pdl,
            num_warps=1,
            launch_pdl=pdl,
        )


def _kinds(caches: Sequence[Tensor | Cache8bit]) -> list[list[Tensor]]:
    """The tensors of ``caches``, by dtype and shape: those of a list are moved in one launch."""
    result: dict[tuple[torch.dtype, torch.Size], list[Tensor]] = {}
    for cache in distinct(caches):
        parts = [cache] if isinstance(cache, Tensor) else [bits(cache.values)]
        if isinstance(cache, Cache8bit) and cache.scales is not None:
            parts.append(cache.scales.unsqueeze(-1))
        for part in parts:
            result.setdefault((part.dtype, part.shape), []).append(part)
    return list(result.values())


def _move_parts(
    caches: Sequence[Tensor],
    source: Tensor,
    target: Tensor,
    each: int,
    put: Callable[[npt.NDArray[np.int64]], Tensor],
) -> None:
    _, both, kv_heads, page_size, dim = caches[0].shape
    pointers = put(np.array([cache.data_ptr() for cache in caches], dtype=np.int64))
    move_kv_kernel[(len(source) // each, both * kv_heads, len(caches))](
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
