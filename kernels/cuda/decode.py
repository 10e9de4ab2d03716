"""Attention of one new token a row over its pages, the sequence split over several blocks (flash decoding).

Each program reads a stretch of one key head's keys and values once, for all query heads that share it. Where there are
few rows, stretches are so long that all programs that have one run at once; the others end as they begin. When a
row's sequence is split, every part leaves its sum, maximum and normaliser (online softmax: Milakov and Gimelshein,
arXiv 1805.02867); the part that ends last puts them together, so that no second kernel is needed (Dao et al.,
"Flash-Decoding", 2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.cuda.launch import multiprocessors, overlapping

__all__ = ["LAUNCHED", "DecodeScratch", "attend_decodes", "split_count"]

_PROGRAMS = 1056  # that fill the device: 8 on each of 132 multiprocessors
_MOST_SPLITS = 64
_TOGETHER = 4096  # numbers of parts that a program adds up at a time
_LONG = 32768  # tokens that one program should not be left alone with
_FEW = 8  # rows
_HELD, _ALONE = 3, 2
"""Programs of a few rows, and of one, that a multiprocessor runs at once, beside those of the next kernel. Where some
begin when others have ended, long rows take longer. More are launched, though: short rows are quicker where
the next kernel comes up behind programs that have nothing to do."""
_SECTOR = 32  # bytes of memory that a cache holds or not
LAUNCHED = 4096
"""Tokens that a graph of decodes is launched for at least, which is for the same reason."""


def split_count(rows: int, kv_heads: int, context: int) -> int:
    """Into how many parts the sequences of a step are cut. ``context``: tokens a sequence may have."""
    even = _PROGRAMS // max(1, rows * kv_heads)
    most = triton.next_power_of_2(max(1, min(_MOST_SPLITS, even, triton.cdiv(context, 64))))
    return max(most, min(4, triton.next_power_of_2(triton.cdiv(context, _LONG))))


@triton.jit
def _join(
    partial,
    stats,
    out,
    head,
    used,
    splits,
    group: tl.constexpr,
    dim: tl.constexpr,
    dim_block: tl.constexpr,
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


@triton.jit
def _lines(
    pages,
    index,
    offset,
    length,
    kv_head,
    kv_heads: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
):
    """Where in the cache the keys of the ``index``-th block are."""
    if page_size % block == 0:
        page = tl.load(pages + index * block // page_size).to(tl.int64)
        line = (page * 2 * kv_heads + kv_head) * page_size + (index * block) % page_size + offset
    else:
        position = index * block + offset
        page = tl.load(pages + position // page_size, mask=position < length, other=0)
        line = (page.to(tl.int64) * 2 * kv_heads + kv_head) * page_size + position % page_size
    return line


@triton.jit
def _attend(
    q, k, v, scales, line, behind, seen, top, norm, total, scale, precision: tl.constexpr, scaled: tl.constexpr
):
    """Sum, maximum and normaliser with a block more. ``behind``: a value's scale stands so far behind its key's."""
    score = tl.dot(q, tl.trans(k), input_precision=precision) * scale
    if scaled:
        score = score * tl.load(scales + line).to(tl.float32)[None, :]
    score = tl.where(seen[None, :], score, -float("inf"))
    above = tl.maximum(top, tl.max(score, 1))
    weight = tl.exp2(score - above[:, None])
    shrink = tl.exp2(top - above)
    norm = norm * shrink + tl.sum(weight, 1)
    if scaled:
        weight = weight * tl.load(scales + line + behind).to(tl.float32)[None, :]
    total = tl.dot(weight.to(v.dtype), v, total * shrink[:, None], input_precision=precision)
    return above, norm, total


@triton.jit(
    do_not_specialize=["page_stride", "length_stride", "splits", "held"],  # they vary from step to step
    do_not_specialize_on_alignment=["pages", "lengths"],  # that steps in graphs and others differ in
)
def _decode(
    queries,
    cache,
    scales,
    pages,
    lengths,
    out,
    partial,
    stats,
    arrived,
    scale,
    window: tl.constexpr,
    query_stride,
    page_stride,
    length_stride,
    splits,
    held,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    dim_block: tl.constexpr,
    group_block: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
    precision: tl.constexpr,
    stages: tl.constexpr,
    together: tl.constexpr,
    scaled: tl.constexpr,
    early: tl.constexpr,
    few: tl.constexpr,
    pdl: tl.constexpr,
):
    """``held``: programs that run at once, to which the blocks of ``few`` rows at most are shared out; 0: there may be
    more rows. The rest is as ``attend_decodes`` says.
    """
    group: tl.constexpr = heads // kv_heads
    like: tl.constexpr = queries.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    member = tl.arange(0, group_block)
    head = kv_head * group + member
    at = tl.arange(0, dim_block)
    offset = tl.arange(0, block)
    if pdl:
        gdc_launch_dependents()
        if not early:
            gdc_wait()
    length = tl.load(lengths + row * length_stride)
    first = 0
    if window > 0:
        first = tl.maximum(length - window, 0)
    first_block = first // block
    blocks = (length + block - 1) // block - first_block
    share = (blocks + splits - 1) // splits
    if few > 0:
        every = blocks
        if few > 1:
            of = tl.arange(0, few)
            theirs = tl.load(lengths + of * length_stride, mask=of < tl.num_programs(0), other=0)
            every = (theirs + block - 1) // block
            if window > 0:
                every -= tl.maximum(theirs - window, 0) // block
            every = tl.sum(every, 0)
        share = tl.maximum(share, (every * kv_heads + held - 1) // held)
    used = (blocks + share - 1) // share
    if split < used:
        top = tl.full([group_block], -float("inf"), tl.float32)
        norm = tl.zeros([group_block], tl.float32)
        total = tl.zeros([group_block, dim_block], tl.float32)
        begin = first_block + split * share
        end = tl.minimum(begin + share, first_block + blocks)
        q_mask = (member < group)[:, None] & (at < dim)[None, :]
        asked = queries + row * query_stride + head[:, None] * dim + at[None, :]
        own = pages + row * page_stride
        if early:
            # The length, pages and all tokens but the newest are of before this step: the first block of them is on its
            # way while the kernel in front ends, which puts the newest into the cache.
            newest = length - 1
            position = begin * block + offset
            line = _lines(own, begin, offset, length, kv_head, kv_heads, page_size, block)
            place = cache + line[:, None] * dim + at[None, :]
            there = (position < newest)[:, None] & (at < dim)[None, :]
            k = tl.load(place, mask=there, other=0.0).to(like)
            v = tl.load(place + kv_heads * page_size * dim, mask=there, other=0.0).to(like)
            page = tl.load(own + newest // page_size).to(tl.int64)
            if pdl:
                gdc_wait()
            q = tl.load(asked, mask=q_mask, other=0.0)
            last = cache + ((page * 2 * kv_heads + kv_head) * page_size + newest % page_size) * dim + at
            new_k = tl.load(last, mask=at < dim, other=0.0).to(like)
            new_v = tl.load(last + kv_heads * page_size * dim, mask=at < dim, other=0.0).to(like)
            here = (position == newest)[:, None]
            k = tl.where(here, new_k[None, :], k)
            v = tl.where(here, new_v[None, :], v)
            seen = (position < length) & (position >= first)
            top, norm, total = _attend(
                q, k, v, scales, line, kv_heads * page_size, seen, top, norm, total, scale, precision, scaled
            )
            begin += 1
        else:
            q = tl.load(asked, mask=q_mask, other=0.0)
        for index in tl.range(begin, end, num_stages=stages):
            position = index * block + offset
            line = _lines(own, index, offset, length, kv_head, kv_heads, page_size, block)
            place = cache + line[:, None] * dim + at[None, :]
            if dim == dim_block:
                k = tl.load(place).to(q.dtype)
                v = tl.load(place + kv_heads * page_size * dim).to(q.dtype)
            else:
                k = tl.load(place, mask=(at < dim)[None, :], other=0.0).to(q.dtype)
                v = tl.load(place + kv_heads * page_size * dim, mask=(at < dim)[None, :], other=0.0).to(q.dtype)
            seen = (position < length) & (position >= first)
            top, norm, total = _attend(
                q, k, v, scales, line, kv_heads * page_size, seen, top, norm, total, scale, precision, scaled
            )
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
                first_head = row * heads + kv_head * group
                _join(partial, stats, out, first_head, used, splits, group, dim, dim_block, together)


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
    rows, heads, dim = queries.shape
    _, _, kv_heads, page_size, _ = cache.shape
    wide = queries.element_size() == 4
    dim_block, group = max(16, triton.next_power_of_2(dim)), triton.next_power_of_2(heads // kv_heads)
    partial, stats, arrived = scratch.room(rows, heads, kv_heads, dim, splits)
    pdl = overlapping(queries.device)
    _decode[(rows, kv_heads, splits)](
        queries,
        cache,
        cache if scales is None else scales,
        pages,
        lengths,
        out,
        partial,
        stats,
        arrived,
        scale * 1.4426950408889634,
        window,
        queries.stride(0),
        pages.stride(0),
        lengths.stride(0),
        splits,
        (_ALONE if rows == 1 else _HELD) * multiprocessors(queries.device),
        heads,
        kv_heads,
        dim,
        dim_block,
        max(16, group),
        page_size,
        32 if wide else 64,
        "ieee" if wide else "tf32",
        2 if wide else 3,
        max(1, _TOGETHER // (group * dim_block)),
        scales is not None,
        # Where a sector holds parts of two tokens, that of the newest would be in the cache as it was before.
        rows == 1 and dim * cache.element_size() % _SECTOR == 0,
        1 if rows == 1 else _FEW if rows <= _FEW else 0,
        pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
