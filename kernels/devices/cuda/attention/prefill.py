"""Prefill attention: chunks of prompts over their pages (Dao, FlashAttention-2, arXiv 2307.08691), in one launch.

A program computes a block of one row's queries for one head. Rows whose keys and values fit into the L2 cache together
are neighbours. Their blocks are ordered alternately from few keys to many and from many to few, and the last ones have
few, so that consecutive programs have similar work and no long one runs alone at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import triton
import triton.language as tl
from torch import Tensor

from kernels.core.attention_rows import AttentionRows
from kernels.devices.cuda.attention.decode import (
    PLAIN,
    capped_score,
    first_seen,
    growth_at,
    key_block,
    reach,
    score_factors,
)
from kernels.devices.cuda.launch import has_large_shared_memory
from kernels.devices.row_attention import CapAndSinks

__all__ = ["TILE", "PrefillBlocks", "attend_prefills", "order_blocks", "plan_prefills"]

TILE: Final = 128
"""The most queries of a block."""
_NEAR = 8192
"""Tokens whose keys and values are read at about the same time: 32 MiB of a layer of 8 heads of dimension 128 in 16
bits; an H200's L2 cache holds 60 MiB."""
_LONG = 1024
"""Tokens of a chunk from which larger blocks pay: 442 to 421 TFLOP/s at 4096 tokens, 203 to 240 at 512 (H200)."""


@dataclass(frozen=True)
class PrefillBlocks:
    """``blocks`` int32 [blocks, 4]: row in ``pages``, first query in the step, number of queries (at most ``TILE``),
    their first position. ``query_block``: queries of a program of ``attend_prefills``: all of a block or half.
    ``pages`` int32 [rows, columns]. ``full``: whether a row has several blocks, or the blocks of several rows are more
    than half full on average.
    """

    blocks: Tensor
    pages: Tensor
    query_block: int
    full: bool


def plan_prefills(rows: AttentionRows, first: int, put: Callable[[npt.NDArray[np.int32]], Tensor]) -> PrefillBlocks:
    """The blocks of rows ``first ..`` of a step."""
    counts = rows.counts[first:]
    pages = put(np.ascontiguousarray(rows.pages[first:]))
    size = TILE if counts.max() > _LONG and has_large_shared_memory(pages.device) else TILE // 2
    blocks = order_blocks(rows, first)
    full = int(counts.max()) > TILE or (len(blocks) > 1 and int(counts.sum()) > TILE // 2 * len(blocks))
    return PrefillBlocks(put(blocks), pages, size, full)


def order_blocks(rows: AttentionRows, first: int) -> npt.NDArray[np.int32]:
    """``PrefillBlocks.blocks`` of rows ``first ..``."""
    counts, starts = rows.counts[first:], rows.starts[first:]
    offsets = np.cumsum(rows.counts)[first:] - counts
    each = -(-counts // TILE)
    row = np.repeat(np.arange(len(counts)), each)
    begin = (np.arange(len(row)) - np.repeat(np.cumsum(each) - each, each)) * TILE
    result = np.stack((row, offsets[row] + begin, np.minimum(counts[row] - begin, TILE), starts[row] + begin), axis=1)
    # Renumber groups without the gaps of long rows: every other group is ascending.
    near = np.unique((np.cumsum(starts + counts) - 1) // _NEAR, return_inverse=True)[1][row]
    rising = (near[-1] - near) % 2 == 1
    return result[np.lexsort((np.where(rising, 1, -1) * result[:, 3], near))].astype(np.int32)


@triton.jit
def _stretch(
    total,
    top,
    norm,
    q,
    cache,
    scales,
    table,
    query_position,
    kv_head,
    begin,
    end,
    length,
    scale,
    cap,
    window: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    dim_block: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
    masked: tl.constexpr,
    precision: tl.constexpr,
    stages: tl.constexpr,
    scaled: tl.constexpr,
    capped: tl.constexpr,
    growth: tl.constexpr,
):
    """Attend to key blocks ``begin .. end``."""
    at = tl.arange(0, dim_block)
    offset = tl.arange(0, block)
    for index in tl.range(begin, end, num_stages=stages):
        position = index * block + offset
        if page_size % block == 0:
            page = tl.load(table + index * block // page_size).to(tl.int64)
            line = (page * 2 * kv_heads + kv_head) * page_size + (index * block) % page_size + offset
        else:
            page = tl.load(table + position // page_size, mask=position < length, other=0).to(tl.int64)
            line = (page * 2 * kv_heads + kv_head) * page_size + position % page_size
        place = cache + line[:, None] * dim + at[None, :]
        if dim == dim_block:
            k = tl.load(place).to(q.dtype)
            v = tl.load(place + kv_heads * page_size * dim).to(q.dtype)
        else:
            k = tl.load(place, mask=(at < dim)[None, :], other=0.0).to(q.dtype)
            v = tl.load(place + kv_heads * page_size * dim, mask=(at < dim)[None, :], other=0.0).to(q.dtype)
        score = tl.dot(q, tl.trans(k), input_precision=precision)
        if scaled:
            score = score * tl.load(scales + line).to(tl.float32)[None, :]
        by = scale
        if capped:
            score, by = capped_score(score * scale, cap), 1.0
        if growth > 0:
            score = score * growth_at(query_position, growth)[:, None]
        if masked:
            seen = position[None, :] <= query_position[:, None]
            if window != 0:
                seen = seen & (position[None, :] > (query_position - reach(query_position, window))[:, None])
            score = tl.where(seen, score, -float("inf"))
        above = tl.maximum(top, tl.max(score, 1) * by)
        if masked:
            above = tl.maximum(above, -1e30)  # all keys of a block may be masked for a query
        weight = tl.exp2(score * by - above[:, None])
        shrink = tl.exp2(top - above)
        norm = norm * shrink + tl.sum(weight, 1)
        if scaled:
            weight = weight * tl.load(scales + line + kv_heads * page_size).to(tl.float32)[None, :]
        total = tl.dot(weight.to(v.dtype), v, total * shrink[:, None], input_precision=precision)
        top = above
    return total, top, norm


@triton.jit(do_not_specialize=["page_stride"])  # it varies from step to step
def prefill_attention_kernel(
    queries,
    cache,
    scales,
    pages,
    blocks,
    sinks,
    out,
    scale,
    cap,
    window: tl.constexpr,
    query_stride,
    page_stride,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    dim_block: tl.constexpr,
    page_size: tl.constexpr,
    query_block: tl.constexpr,
    parts: tl.constexpr,
    block: tl.constexpr,
    precision: tl.constexpr,
    stages: tl.constexpr,
    scaled: tl.constexpr,
    capped: tl.constexpr,
    sunk: tl.constexpr,
    growth: tl.constexpr,
):
    head = tl.program_id(0)
    which = tl.program_id(1) // parts
    skipped = (tl.program_id(1) % parts) * query_block
    row = tl.load(blocks + which * 4).to(tl.int64)
    first_query = tl.load(blocks + which * 4 + 1) + skipped
    count = tl.load(blocks + which * 4 + 2) - skipped
    start = tl.load(blocks + which * 4 + 3) + skipped
    if count <= 0:
        return
    count = tl.minimum(count, query_block)
    kv_head = head // (heads // kv_heads)
    member = tl.arange(0, query_block)
    at = tl.arange(0, dim_block)
    mask = (member < count)[:, None] & (at < dim)[None, :]
    token = (first_query + member).to(tl.int64)
    q = tl.load(queries + token[:, None] * query_stride + head * dim + at[None, :], mask=mask, other=0.0)
    query_position = start + tl.minimum(member, count - 1)
    length = start + count
    table = pages + row * page_stride
    top = tl.full([query_block], -float("inf"), tl.float32)
    norm = tl.zeros([query_block], tl.float32)
    total = tl.zeros([query_block, dim_block], tl.float32)
    if sunk:  # one more token without a value
        top = tl.zeros([query_block], tl.float32) + 1.4426950408889634 * tl.load(sinks + head)
        norm = tl.full([query_block], 1.0, tl.float32)
    first = 0
    whole = (start + 1) // block  # every query attends to all blocks before this one
    if window != 0:
        first = first_seen(start, window) // block
        whole = first
    last = (length + block - 1) // block
    total, top, norm = _stretch(
        total, top, norm, q, cache, scales, table, query_position, kv_head, first, whole, length, scale, cap, window,
        kv_heads, dim, dim_block, page_size, block, False, precision, stages, scaled, capped, growth,
    )  # fmt: skip
    total, top, norm = _stretch(
        total, top, norm, q, cache, scales, table, query_position, kv_head, whole, last, length, scale, cap, window,
        kv_heads, dim, dim_block, page_size, block, True, precision, stages, scaled, capped, growth,
    )  # fmt: skip
    result = out + token[:, None] * heads * dim + head * dim + at[None, :]
    tl.store(result, (total / norm[:, None]).to(out.dtype.element_ty), mask=mask)


def attend_prefills(
    queries: Tensor,
    cache: Tensor,
    plan: PrefillBlocks,
    window: int,
    scale: float,
    out: Tensor,
    scales: Tensor | None = None,
    extra: CapAndSinks = PLAIN,
) -> None:
    """Attend with the ``queries`` [tokens, heads, dim] of the plan's blocks; results go to ``out``, of the same shape
    and contiguous.

    ``cache`` and ``scales``: as in ``attend_decodes``. ``window``: as ``ModelConfig.windows``.
    """
    _, heads, dim = queries.shape
    _, _, kv_heads, page_size, _ = cache.shape
    wide = queries.element_size() == 4
    dim_block = max(16, triton.next_power_of_2(dim))
    block, stages = key_block(dim_block, wide, queries.device)
    query_block, warps = plan.query_block, 8 if wide else 4
    if dim_block > 256:  # a tile's sums fill the registers
        query_block, warps = 32 if wide or not has_large_shared_memory(queries.device) else 64, 8
    elif not wide:
        block = plan.query_block // 2
    parts = TILE // query_block
    factor, cap = score_factors(scale, extra)
    prefill_attention_kernel[(heads, parts * len(plan.blocks))](
        queries,
        cache,
        cache if scales is None else scales,
        plan.pages,
        plan.blocks,
        queries if extra.sinks is None else extra.sinks,
        out,
        factor,
        cap,
        window,
        queries.stride(0),
        plan.pages.stride(0),
        heads,
        kv_heads,
        dim,
        dim_block,
        page_size,
        query_block,
        parts,
        block,
        "ieee" if wide else "tf32",
        stages,
        scales is not None,
        bool(extra.cap),
        extra.sinks is not None,
        extra.growth_length,
        num_warps=warps,
    )
