"""Decode attention: one new token a row over its pages, with sequences split over several programs (flash decoding).

Each program reads one part of a key head's keys and values once, for all query heads that share it. With few rows the
parts are so long that all programs with work run at once; the others exit immediately. Each part of a split sequence
stores its sum, maximum and normalizer (online softmax: Milakov and Gimelshein, arXiv 1805.02867). The part that
finishes last combines them, so that no second kernel is needed (Dao et al., "Flash-Decoding", 2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.devices.cuda.launch import has_large_shared_memory, multiprocessors, overlapping
from kernels.devices.row_attention import CapAndSinks

__all__ = [
    "LAUNCHED",
    "PLAIN",
    "DecodeScratch",
    "attend_decodes",
    "capped_score",
    "first_seen",
    "growth_at",
    "key_block",
    "reach",
    "score_factors",
    "split_count",
]

PLAIN = CapAndSinks()
"""Scores as they are."""
_LOG2_E = 1.4426950408889634
_PROGRAMS = 1056  # programs that fill the device: 8 on each of 132 multiprocessors
_MAX_SPLITS = 64
_TOGETHER = 4096  # elements of parts that a program sums at a time
_LONG = 32768  # longer sequences are always split
_FEW = 8  # rows
_HELD, _ALONE = 3, 2
"""Programs that a multiprocessor runs at once, next to those of the next kernel: for a few rows, and for one. Long rows
are slower if some programs start after others have ended. More programs are launched nevertheless: short rows are
faster if the next kernel starts after programs without work."""
_SECTOR = 32  # bytes of a sector, the unit of caching
LAUNCHED = 4096
"""The smallest context of a graph of decodes, for the same reason."""


def split_count(rows: int, kv_heads: int, context: int) -> int:
    """The number of parts that the sequences of a step are split into. ``context``: most tokens of a sequence."""
    even = _PROGRAMS // max(1, rows * kv_heads)
    max_splits = triton.next_power_of_2(max(1, min(_MAX_SPLITS, even, triton.cdiv(context, 64))))
    return max(max_splits, min(4, triton.next_power_of_2(triton.cdiv(context, _LONG))))


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
    """Combine the parts of the ``group`` heads from ``head`` on into ``out``, ``together`` parts at a time."""
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
    """Offsets in the cache of the keys of block ``index``."""
    if page_size % block == 0:
        page = tl.load(pages + index * block // page_size).to(tl.int64)
        line = (page * 2 * kv_heads + kv_head) * page_size + (index * block) % page_size + offset
    else:
        position = index * block + offset
        page = tl.load(pages + position // page_size, mask=position < length, other=0)
        line = (page.to(tl.int64) * 2 * kv_heads + kv_head) * page_size + position % page_size
    return line


def score_factors(scale: float, extra: CapAndSinks) -> tuple[float, float]:
    """What kernels multiply products of queries and keys with, and the bound of ``capped_score``: scores are powers of
    two."""
    if extra.cap:
        return 2.0 * _LOG2_E * scale / extra.cap, _LOG2_E * extra.cap
    return _LOG2_E * scale, 0.0


@triton.jit
def capped_score(score, cap):
    """``cap * tanh(x)``, where 2 ** score is e ** 2x."""
    return cap - 2.0 * cap / (1.0 + tl.exp2(score))


@triton.jit
def reach(position, window: tl.constexpr):
    """Tokens that queries at ``position`` attend to, themselves included: ``window``, or if that is negative those
    since its last multiple."""
    if window > 0:
        seen = position * 0 + window
    else:
        seen = position % -window + 1
    return seen


@triton.jit
def first_seen(position, window: tl.constexpr):
    """The first token that a query at ``position`` attends to."""
    first = position * 0
    if window != 0:
        first = tl.maximum(position + 1 - reach(position, window), 0)
    return first


@triton.jit
def growth_at(position, growth: tl.constexpr):
    """What multiplies scores of queries at ``position``: logarithms grow beyond ``growth`` tokens."""
    length = tl.full([], growth, tl.float32)
    return tl.log2(tl.maximum(position.to(tl.float32), length)) / tl.log2(length)


def key_block(dim_block: int, wide: bool, device: torch.device) -> tuple[int, int]:
    """Keys of a block, and how many blocks are on their way. ``wide``: whether numbers have 32 bits."""
    if dim_block <= 256:
        return (32, 2) if wide else (64, 3)
    return (16, 1) if wide else (32, 2) if has_large_shared_memory(device) else (16, 1)


@triton.jit
def _attend(
    q,
    k,
    v,
    scales,
    line,
    behind,
    seen,
    top,
    norm,
    total,
    scale,
    cap,
    grown,
    precision: tl.constexpr,
    scaled: tl.constexpr,
    capped: tl.constexpr,
):
    """Update sum, maximum and normalizer with another block. ``behind``: distance from a key's scale to its value's."""
    score = tl.dot(q, tl.trans(k), input_precision=precision) * scale
    if scaled:
        score = score * tl.load(scales + line).to(tl.float32)[None, :]
    if capped:
        score = capped_score(score, cap)
    score = score * grown
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
    do_not_specialize_on_alignment=["pages", "lengths"],  # alignment differs between steps in graphs and others
)
def decode_attention_kernel(
    queries,
    cache,
    scales,
    pages,
    lengths,
    sinks,
    out,
    partial,
    stats,
    arrived,
    scale,
    cap,
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
    capped: tl.constexpr,
    sunk: tl.constexpr,
    growth: tl.constexpr,
    early: tl.constexpr,
    few: tl.constexpr,
    pdl: tl.constexpr,
):
    """``held``: programs that run at once, over which the blocks of at most ``few`` rows are distributed; 0: there may
    be more rows. For the rest see ``attend_decodes``.
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
    first = first_seen(length - 1, window)
    grown = 1.0
    if growth > 0:
        grown = growth_at(length - 1, growth)
    first_block = first // block
    blocks = (length + block - 1) // block - first_block
    share = (blocks + splits - 1) // splits
    if few > 0:
        every = blocks
        if few > 1:
            of = tl.arange(0, few)
            theirs = tl.load(lengths + of * length_stride, mask=of < tl.num_programs(0), other=0)
            every = (theirs + block - 1) // block
            every -= first_seen(tl.maximum(theirs - 1, 0), window) // block
            every = tl.sum(every, 0)
        share = tl.maximum(share, (every * kv_heads + held - 1) // held)
    used = (blocks + share - 1) // share
    if split < used:
        top = tl.full([group_block], -float("inf"), tl.float32)
        norm = tl.zeros([group_block], tl.float32)
        total = tl.zeros([group_block, dim_block], tl.float32)
        if sunk:  # one more token without a value, which the first part has seen
            sink = tl.load(sinks + head, mask=(member < group) & (split == 0), other=-float("inf"))
            top = sink * 1.4426950408889634
            norm = tl.where(top > -float("inf"), 1.0, 0.0)
        begin = first_block + split * share
        end = tl.minimum(begin + share, first_block + blocks)
        q_mask = (member < group)[:, None] & (at < dim)[None, :]
        query_pointers = queries + row * query_stride + head[:, None] * dim + at[None, :]
        own = pages + row * page_stride
        if early:
            # Length, pages and all tokens but the newest are from before this step: their first block loads while the
            # previous kernel ends, which writes the newest token to the cache.
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
            q = tl.load(query_pointers, mask=q_mask, other=0.0)
            last = cache + ((page * 2 * kv_heads + kv_head) * page_size + newest % page_size) * dim + at
            new_k = tl.load(last, mask=at < dim, other=0.0).to(like)
            new_v = tl.load(last + kv_heads * page_size * dim, mask=at < dim, other=0.0).to(like)
            here = (position == newest)[:, None]
            k = tl.where(here, new_k[None, :], k)
            v = tl.where(here, new_v[None, :], v)
            seen = (position < length) & (position >= first)
            top, norm, total = _attend(
                q, k, v, scales, line, kv_heads * page_size, seen, top, norm, total, scale, cap, grown,
                precision, scaled, capped,
            )  # fmt: skip
            begin += 1
        else:
            q = tl.load(query_pointers, mask=q_mask, other=0.0)
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
                q, k, v, scales, line, kv_heads * page_size, seen, top, norm, total, scale, cap, grown,
                precision, scaled, capped,
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
                first_head = row * heads + kv_head * group
                _join(partial, stats, out, first_head, used, splits, group, dim, dim_block, together)


class DecodeScratch:
    """Memory for the results of the parts of split sequences; it grows when a step needs more.

    Memory that was returned earlier is kept, because graphs continue to use it.
    """

    def __init__(self, device: torch.device) -> None:
        self._partial = torch.empty(0, dtype=torch.float32, device=device)
        self._stats = torch.empty(0, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(0, dtype=torch.int32, device=device)
        self._outgrown: list[Tensor] = []

    def room(self, rows: int, heads: int, kv_heads: int, dim: int, splits: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns sums [rows, heads, splits, dim], maxima and normalizers, and counters that are zero between steps."""
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
    extra: CapAndSinks = PLAIN,
) -> None:
    """Attend with ``queries`` [rows, heads, dim], one per row, to ``lengths`` int32 [rows] cached tokens, at least 1.

    Results go to ``out``, of the same shape and contiguous. ``cache`` [pages, 2, kv_heads, page_size, dim]; ``scales``
    [pages, 2, kv_heads, page_size]: dynamic scales of tokens, if any; ``pages`` int32 [rows, columns]; ``window``: as
    ``ModelConfig.windows``.
    """
    rows, heads, dim = queries.shape
    _, _, kv_heads, page_size, _ = cache.shape
    wide = queries.element_size() == 4
    dim_block, group = max(16, triton.next_power_of_2(dim)), triton.next_power_of_2(heads // kv_heads)
    partial, stats, arrived = scratch.room(rows, heads, kv_heads, dim, splits)
    pdl = overlapping(queries.device)
    factor, cap = score_factors(scale, extra)
    block, stages = key_block(dim_block, wide, queries.device)
    decode_attention_kernel[(rows, kv_heads, splits)](
        queries,
        cache,
        cache if scales is None else scales,
        pages,
        lengths,
        queries if extra.sinks is None else extra.sinks,
        out,
        partial,
        stats,
        arrived,
        factor,
        cap,
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
        block,
        "ieee" if wide else "tf32",
        stages,
        max(1, _TOGETHER // (group * dim_block)),
        scales is not None,
        bool(extra.cap),
        extra.sinks is not None,
        extra.growth_length,
        # If a sector contains parts of two tokens, an early read would cache stale data of the newest.
        rows == 1 and dim * cache.element_size() % _SECTOR == 0,
        1 if rows == 1 else _FEW if rows <= _FEW else 0,
        pdl,
        num_warps=4 if dim_block <= 256 else 8,
        launch_pdl=pdl,
    )
