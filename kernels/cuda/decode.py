"""Attention of one new token a row over its pages, the sequence split over several blocks (flash decoding).

Each program reads a stretch of one key head's keys and values once, for all query heads that share it. When a row's
sequence is split, every part leaves its sum, maximum and normaliser (online softmax: Milakov and Gimelshein,
arXiv 1805.02867); the part that ends last puts them together, so that no second kernel is needed (Dao et al.,
"Flash-Decoding", 2023).

Queries come placed (``kernels.cuda.heads``) or raw (``kernels.cuda.raw_heads``). Of raw ones each program turns its
own, and the last part of a sequence its new key too: it begins with that key and its value as they are in registers and
puts them into the cache. What a part reads first, of tokens of earlier steps, it reads while the projection still runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.cuda.launch import overlapping
from kernels.cuda.raw_heads import RawHeads, Shape, begin_raw, raw_shape

__all__ = ["DecodeScratch", "attend_decodes", "attend_raw", "split_count"]

_PROGRAMS = 1056  # that fill the device: 8 on each of 132 multiprocessors
_MOST_SPLITS = 64
_LONG = 32768  # tokens that one program should not be left alone with


def split_count(rows: int, kv_heads: int, context: int) -> int:
    """Into how many parts the sequences of a step are cut. ``context``: tokens a sequence may have."""
    even = _PROGRAMS // max(1, rows * kv_heads)
    most = triton.next_power_of_2(max(1, min(_MOST_SPLITS, even, triton.cdiv(context, 64))))
    return max(most, min(4, triton.next_power_of_2(triton.cdiv(context, _LONG))))


@triton.jit
def _take(
    total,
    top,
    norm,
    q,
    k,
    v,
    key_sizes,
    value_sizes,
    seen,
    scale,
    precision: tl.constexpr,
    scaled: tl.constexpr,
):
    """The online softmax behind some more keys."""
    score = tl.dot(q, tl.trans(k), input_precision=precision) * scale
    if scaled:
        score = score * key_sizes[None, :]
    score = tl.where(seen[None, :], score, -float("inf"))
    above = tl.maximum(top, tl.max(score, 1))
    weight = tl.exp2(score - above[:, None])
    shrink = tl.exp2(top - above)
    norm = norm * shrink + tl.sum(weight, 1)
    if scaled:
        weight = weight * value_sizes[None, :]
    total = tl.dot(weight.to(v.dtype), v, total * shrink[:, None], input_precision=precision)
    return total, above, norm


@triton.jit
def _join(
    partial,
    stats,
    out,
    head,
    used,
    group: tl.constexpr,
    dim: tl.constexpr,
    dim_block: tl.constexpr,
    splits: tl.constexpr,
    together: tl.constexpr,
):
    """The parts of the ``group`` heads from ``head`` on into ``out``, ``together`` of them at a time."""
    lines: tl.constexpr = triton.next_power_of_2(group)
    line = tl.arange(0, lines)
    at = tl.arange(0, dim_block)
    top = tl.full([lines], -float("inf"), tl.float32)
    norm = tl.zeros([lines], tl.float32)
    total = tl.zeros([lines, dim_block], tl.float32)
    for begin in range(0, used, together):
        part = begin + tl.arange(0, together)
        there = (line < group)[:, None] & (part < used)[None, :]
        of = (head + line)[:, None] * splits + part[None, :]
        t = tl.load(stats + of * 2, mask=there, other=-float("inf"), cache_modifier=".cg")
        n = tl.load(stats + of * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        a = tl.load(
            partial + of[:, :, None] * dim + at[None, None, :],
            mask=there[:, :, None] & (at < dim)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        above = tl.where(line < group, tl.maximum(top, tl.max(t, 1)), 0.0)
        grow, shrink = tl.exp2(t - above[:, None]), tl.exp2(top - above)
        norm = norm * shrink + tl.sum(n * grow, 1)
        total = total * shrink[:, None] + tl.sum(a * grow[:, :, None], 1)
        top = above
    mask = (line < group)[:, None] & (at < dim)[None, :]
    to = out + (head + line)[:, None] * dim + at[None, :]
    tl.store(to, (total / norm[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["page_stride", "length_stride"])  # they vary from step to step
def _decode(
    queries,
    gains,
    cos,
    sin,
    places,
    cache,
    scales,
    pages,
    lengths,
    out,
    partial,
    stats,
    arrived,
    eps,
    scale,
    window: tl.constexpr,
    query_stride,
    page_stride,
    length_stride,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    dim_block: tl.constexpr,
    group_block: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
    lead: tl.constexpr,
    least: tl.constexpr,
    splits: tl.constexpr,
    precision: tl.constexpr,
    stages: tl.constexpr,
    together: tl.constexpr,
    raw: tl.constexpr,
    normed: tl.constexpr,
    scaled: tl.constexpr,
    pdl: tl.constexpr,
):
    group: tl.constexpr = heads // kv_heads
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    member = tl.arange(0, group_block)
    head = kv_head * group + member
    at = tl.arange(0, dim_block)
    offset = tl.arange(0, block)
    table = pages + row * page_stride
    if pdl:
        gdc_launch_dependents()
        if not raw:
            gdc_wait()
    length = tl.load(lengths + row * length_stride)
    held = length  # tokens that are read from the cache
    if raw:
        held = length - 1
    first = 0
    if window > 0:
        first = tl.maximum(length - window, 0)
    first_block = first // block
    blocks = tl.maximum((held + block - 1) // block - first_block, 0)
    share = tl.maximum((blocks + splits - 1) // splits, least)
    used = tl.maximum((blocks + share - 1) // share, 1)
    if split < used:
        q_mask = (member < group)[:, None] & (at < dim)[None, :]
        begin = first_block + split * share
        end = tl.minimum(begin + share, first_block + blocks)
        if raw:
            q, early_k, early_v, early, total, top, norm = begin_raw(
                queries, gains, cos, sin, places, cache, table, row, kv_head, first, tl.minimum(held, end * block),
                begin * block, split == used - 1, eps, scale, query_stride, heads, kv_heads, dim, dim_block,
                group_block, page_size, lead, normed, pdl,
            )  # fmt: skip
            total, top, norm = _take(
                total, top, norm, q, early_k, early_v, 1.0, 1.0, early, scale, precision, False
            )  # fmt: skip
            begin += lead // block
        else:
            q = tl.load(queries + row * query_stride + head[:, None] * dim + at[None, :], mask=q_mask, other=0.0)
            top = tl.full([group_block], -float("inf"), tl.float32)
            norm = tl.zeros([group_block], tl.float32)
            total = tl.zeros([group_block, dim_block], tl.float32)
        for index in tl.range(begin, end, num_stages=stages):
            position = index * block + offset
            if page_size % block == 0:
                page = tl.load(table + index * block // page_size).to(tl.int64)
                line = (page * 2 * kv_heads + kv_head) * page_size + (index * block) % page_size + offset
            else:
                page = tl.load(table + position // page_size, mask=position < held, other=0)
                line = (page.to(tl.int64) * 2 * kv_heads + kv_head) * page_size + position % page_size
            place = cache + line[:, None] * dim + at[None, :]
            if dim == dim_block:
                k = tl.load(place).to(q.dtype)
                v = tl.load(place + kv_heads * page_size * dim).to(q.dtype)
            else:
                k = tl.load(place, mask=(at < dim)[None, :], other=0.0).to(q.dtype)
                v = tl.load(place + kv_heads * page_size * dim, mask=(at < dim)[None, :], other=0.0).to(q.dtype)
            key_sizes, value_sizes = 1.0, 1.0
            if scaled:
                key_sizes = tl.load(scales + line).to(tl.float32)
                value_sizes = tl.load(scales + line + kv_heads * page_size).to(tl.float32)
            seen = (position < held) & (position >= first)
            total, top, norm = _take(
                total, top, norm, q, k, v, key_sizes, value_sizes, seen, scale, precision, scaled
            )  # fmt: skip
        result = out + row * heads * dim + head[:, None] * dim + at[None, :]
        if used == 1:
            tl.store(result, (total / norm[:, None]).to(out.dtype.element_ty), mask=q_mask)
        else:
            part = (row * heads + head) * splits
            tl.store(partial + (part + split)[:, None] * dim + at[None, :], total, mask=q_mask)
            tl.store(stats + (part + split) * 2, top, mask=member < group)
            tl.store(stats + (part + split) * 2 + 1, norm, mask=member < group)
            tl.debug_barrier()
            before = tl.atomic_add(arrived + row * kv_heads + kv_head, 1, sem="acq_rel")
            if before == used - 1:
                tl.debug_barrier()
                tl.store(arrived + row * kv_heads + kv_head, 0)
                _join(
                    partial, stats, out, row * heads + kv_head * group, used, group, dim, dim_block, splits, together
                )  # fmt: skip


class DecodeScratch:
    """What the parts of split sequences leave for one another; taken anew when a step needs more of it.

    What was given out once is kept: graphs go on using the memory that they were captured with.
    """

    def __init__(self, device: torch.device) -> None:
        self._partial = torch.empty(0, dtype=torch.float32, device=device)
        self._stats = torch.empty(0, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(0, dtype=torch.int32, device=device)
        self._outgrown: list[Tensor] = []

    def room(self, rows: int, heads: int, kv_heads: int, dim: int, splits: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sums [rows, heads, splits, dim], maxima and normalisers, and counters that are zero between steps."""
        parts = rows * heads * splits if splits > 1 else 1
        self._partial = self._grown(self._partial, parts * dim)
        self._stats = self._grown(self._stats, 2 * parts)
        self._arrived = self._grown(self._arrived, rows * kv_heads)
        return self._partial, self._stats, self._arrived

    def _grown(self, held: Tensor, size: int) -> Tensor:
        if len(held) >= size:
            return held
        self._outgrown.append(held)
        return held.new_zeros(max(size, 2 * len(held)))  # doubled: what is kept stays less than what is used


def attend_decodes(
    queries: Tensor,
    cache: Tensor,
    pages: Tensor,
    lengths: Tensor,
    window: int,
    scale: float,
    splits: int,
    scratch: DecodeScratch,
    out: Tensor,
    scales: Tensor | None = None,
) -> None:
    """``queries`` [rows, heads, dim], one a row, over ``lengths`` int32 [rows] cached tokens; ``out`` likewise, dense.

    ``cache`` [pages, 2, kv_heads, page_size, dim], ``scales`` [pages, 2, kv_heads, page_size], each token's, where it
    has any; ``pages`` int32 [rows, columns]; ``window``: tokens a query sees,
    0 for all. A row's length is at least 1.
    """
    _launch(queries, None, None, cache, scales, pages, lengths, window, scale, splits, scratch, out)


def attend_raw(
    qkv: Tensor,
    raw: RawHeads,
    cache: Tensor,
    pages: Tensor,
    lengths: Tensor,
    window: int,
    scale: float,
    splits: int,
    scratch: DecodeScratch,
    out: Tensor,
    shape: Shape | None = None,
) -> None:
    """``attend_decodes`` of the queries of ``qkv`` [rows, heads + 2 * kv_heads, dim], dense, as a projection gives
    them; its keys and values are put into the cache, which has its dtype. ``lengths`` count them.

    ``lengths``, ``pages`` and what the cache has of earlier tokens must not be of a kernel that may run still: a kernel
    launched without overlap, a copy or the begin of a graph stands between.
    """
    every, dim = qkv.shape[1:]
    if shape is None:
        shape = raw_shape(_dim_block(dim), qkv.element_size() == 4)
    queries = qkv[:, : every - 2 * cache.shape[2]]
    splits = min(splits, triton.next_power_of_2(triton.cdiv(pages.shape[1] * cache.shape[3], shape.part or shape.lead)))
    _launch(queries, raw, shape, cache, None, pages, lengths, window, scale, splits, scratch, out)


def _dim_block(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


def _launch(
    queries: Tensor,
    raw: RawHeads | None,
    shape: Shape | None,
    cache: Tensor,
    scales: Tensor | None,
    pages: Tensor,
    lengths: Tensor,
    window: int,
    scale: float,
    splits: int,
    scratch: DecodeScratch,
    out: Tensor,
) -> None:
    rows, heads, dim = queries.shape
    _, _, kv_heads, page_size, _ = cache.shape
    wide, dim_block, group = queries.element_size() == 4, _dim_block(dim), heads // kv_heads
    block, lead, least, warps, stages = 32 if wide else 64, 0, 1, 4, 2 if wide else 3
    if shape is not None:
        lead, least, warps, stages = shape.lead, (shape.part or shape.lead) // block, shape.warps, shape.stages
    partial, stats, arrived = scratch.room(rows, heads, kv_heads, dim, splits)
    pdl = overlapping(queries.device)
    _decode[(rows, kv_heads, splits)](
        queries,
        queries if raw is None or raw.gains is None else raw.gains,
        queries if raw is None else raw.cos,
        queries if raw is None else raw.sin,
        lengths if raw is None else raw.places,
        cache,
        cache if scales is None else scales,
        pages,
        lengths,
        out,
        partial,
        stats,
        arrived,
        0.0 if raw is None else raw.eps,
        scale * 1.4426950408889634,
        window,
        queries.stride(0),
        pages.stride(0),
        lengths.stride(0),
        heads,
        kv_heads,
        dim,
        dim_block,
        max(16, triton.next_power_of_2(group)),
        page_size,
        block,
        lead,
        least,
        splits,
        "ieee" if wide else "tf32",
        stages,
        max(1, min(splits, 1024 * warps // (triton.next_power_of_2(group) * dim_block))),
        raw is not None,
        raw is not None and raw.gains is not None,
        scales is not None,
        pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
