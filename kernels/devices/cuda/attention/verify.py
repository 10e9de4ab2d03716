"""Verification attention: a few draft tokens a row over the row's pages.

It is flash decoding (``kernels.devices.cuda.attention.decode``) with a row's queries and the query heads of one key
head as the lines of a tile. A second kernel combines the parts of split sequences, with one program for each line,
since one program for a whole tile would read too much. Tree masks are bits that the device reads, like lengths and
pages, so a graph can be replayed for any tree.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.devices.cuda.attention.decode import (
    PLAIN,
    DecodeScratch,
    capped_score,
    first_seen,
    growth_at,
    key_block,
    reach,
    score_factors,
)
from kernels.devices.cuda.launch import overlapping
from kernels.devices.row_attention import CapAndSinks

__all__ = ["HEADER", "attend_drafts", "draft_splits", "ones"]

HEADER = 4
"""Numbers of a row's state before its pages: its first token in the step, its number of tokens, its root's position
(queries attend to all tokens before it), and its tokens in the cache, including the step's."""

_LINES = 64  # of a tile, at most
_PROGRAMS = 1056  # programs of 16 lines that fill the device: 8 on each of 132 multiprocessors
_MAX_SPLITS = 64
_LONG = 32768  # longer sequences are always split


def _queries(group: int, tokens: int) -> int:
    """Queries of one program."""
    return max(1, min(tokens, _LINES // group))


def _lines(group: int, tokens: int) -> int:
    """Lines of a program's tile."""
    return max(16, triton.next_power_of_2(_queries(group, tokens) * group))


def draft_splits(rows: int, tokens: int, heads_each: int, kv_heads: int, context: int) -> int:
    """The number of parts that sequences are split into. ``tokens``: most draft tokens of a row. ``heads_each``: query
    heads of a key head."""
    each = _queries(heads_each, tokens)
    programs = _PROGRAMS * 16 // _lines(heads_each, tokens)
    even = programs // (rows * triton.cdiv(tokens, each) * kv_heads)
    max_splits = max(1, min(_MAX_SPLITS, even, triton.cdiv(context, 64)))
    return max(1 << max_splits.bit_length() - 1, min(4, triton.next_power_of_2(triton.cdiv(context, _LONG))))


@triton.jit
def ones(x):
    """The number of bits that are set in ``x``."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def _bring_near(
    cache,
    table,
    index,
    length,
    kv_head,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
):
    """Prefetch the keys and values of a block to the L2 cache. Some may still be written, which is harmless there."""
    bytes_: tl.constexpr = dim * cache.dtype.element_ty.primitive_bitwidth // 8
    position = index * block + tl.arange(0, block)
    page = tl.load(table + position // page_size, mask=position < length, other=0).to(tl.int64)
    place = cache + ((page * 2 * kv_heads + kv_head) * page_size + position % page_size) * dim
    if bytes_ % 16 == 0:
        _near(place, bytes_)
        _near(place + kv_heads * page_size * dim, bytes_)


@triton.jit
def _near(place, bytes_: tl.constexpr):
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [place.to(tl.int64), tl.full(place.shape, bytes_, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _stretch(
    total,
    top,
    norm,
    q,
    cache,
    scales,
    table,
    bits,
    root,
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
    path = root + ones(bits) - 1  # the queries' positions
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
        score = tl.dot(q, tl.trans(k), input_precision=precision) * scale
        if scaled:
            score = score * tl.load(scales + line).to(tl.float32)[None, :]
        if capped:
            score = capped_score(score, cap)
        if growth > 0:
            score = score * growth_at(path, growth)[:, None]
        if masked:
            node = position - root
            left = bits[:, None] >> tl.minimum(tl.maximum(node, 0), 63).to(tl.uint64)[None, :]
            own = ((left & 1) != 0) & ((node >= 0) & (node < 64))[None, :]
            seen = (node < 0)[None, :]
            if window != 0:
                near = reach(path, window)
                own = own & (ones(left) <= near[:, None])
                seen = seen & (position[None, :] > (path - near)[:, None])
            score = tl.where(seen | own, score, -float("inf"))
        above = tl.maximum(top, tl.max(score, 1))
        if masked:
            above = tl.maximum(above, -1e30)  # all keys of a block may be masked for a query
        weight = tl.exp2(score - above[:, None])
        shrink = tl.exp2(top - above)
        norm = norm * shrink + tl.sum(weight, 1)
        if scaled:
            weight = weight * tl.load(scales + line + kv_heads * page_size).to(tl.float32)[None, :]
        total = tl.dot(weight.to(v.dtype), v, total * shrink[:, None], input_precision=precision)
        top = above
    return total, top, norm


@triton.jit(do_not_specialize=["state_stride", "bits_stride", "blocks", "splits"])
def verify_attention_kernel(
    queries,
    cache,
    scales,
    state,
    bits,
    sinks,
    out,
    partial,
    stats,
    scale,
    cap,
    window: tl.constexpr,
    query_stride,
    state_stride,
    bits_stride,
    blocks,
    header: tl.constexpr,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    dim_block: tl.constexpr,
    each: tl.constexpr,
    lines: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
    fixed: tl.constexpr,
    splits,
    tree: tl.constexpr,
    precision: tl.constexpr,
    stages: tl.constexpr,
    scaled: tl.constexpr,
    capped: tl.constexpr,
    sunk: tl.constexpr,
    growth: tl.constexpr,
    early: tl.constexpr,
    pdl: tl.constexpr,
):
    """``fixed``: ``splits`` if each number has a separate kernel; 0 for one kernel for all."""
    parts = splits
    if fixed > 0:
        parts = fixed
    group: tl.constexpr = heads // kv_heads
    row = tl.program_id(0) // blocks
    query_block = tl.program_id(0) % blocks
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    line = tl.arange(0, lines)
    query = query_block * each + line // group
    head = kv_head * group + line % group
    at = tl.arange(0, dim_block)
    if pdl:
        gdc_launch_dependents()
        if not early:
            gdc_wait()
    own = state + row.to(tl.int64) * state_stride
    token = tl.load(own)
    count = tl.load(own + 1)
    root = tl.load(own + 2)
    length = tl.load(own + 3)
    there = (line < each * group) & (query < count)
    if tree:
        seen = tl.load(bits + row.to(tl.int64) * bits_stride + query, mask=there, other=1).to(tl.uint64, bitcast=True)
    else:
        everything = tl.full([lines], -1, tl.int64).to(tl.uint64, bitcast=True)
        seen = everything >> (63 - tl.minimum(query, 63)).to(tl.uint64)
    first = first_seen(root, window)
    first_block = first // block
    every = (length + block - 1) // block - first_block
    share = (every + parts - 1) // parts
    used = (every + share - 1) // share
    if (split < used) & (query_block * each < count):
        table = own + header
        begin = first_block + split * share
        end = tl.minimum(begin + share, first_block + every)
        if early and pdl:  # a program with nothing to do has gone: its room is for the weights of the next kernel
            _bring_near(cache, table, begin, length, kv_head, kv_heads, dim, page_size, block)
            gdc_wait()
        mask = there[:, None] & (at < dim)[None, :]
        place = (token + query).to(tl.int64)
        q = tl.load(queries + place[:, None] * query_stride + head[:, None] * dim + at[None, :], mask=mask, other=0.0)
        top = tl.full([lines], -float("inf"), tl.float32)
        norm = tl.zeros([lines], tl.float32)
        total = tl.zeros([lines, dim_block], tl.float32)
        if sunk:  # one more token without a value, which the first part has seen
            sink = tl.load(sinks + head, mask=there & (split == 0), other=-float("inf"))
            top = sink * 1.4426950408889634
            norm = tl.where(top > -float("inf"), 1.0, 0.0)
        whole = begin  # every query attends to all blocks before this one
        if window == 0:
            whole = tl.minimum(tl.maximum(root // block, begin), end)
        total, top, norm = _stretch(
            total, top, norm, q, cache, scales, table, seen, root, kv_head, begin, whole, length, scale, cap, window,
            kv_heads, dim, dim_block, page_size, block, False, precision, stages, scaled, capped, growth,
        )  # fmt: skip
        total, top, norm = _stretch(
            total, top, norm, q, cache, scales, table, seen, root, kv_head, whole, end, length, scale, cap, window,
            kv_heads, dim, dim_block, page_size, block, True, precision, stages, scaled, capped, growth,
        )  # fmt: skip
        result = out + place[:, None] * heads * dim + head[:, None] * dim + at[None, :]
        if used == 1:
            norm = tl.where(norm > 0.0, norm, 1.0)  # queries behind a row's tokens, as graphs have them, may see none
            tl.store(result, (total / norm[:, None]).to(out.dtype.element_ty), mask=mask)
        else:
            part = (place * heads + head) * parts
            tl.store(partial + (part + split)[:, None] * dim + at[None, :], total, mask=mask)
            tl.store(stats + (part + split) * 2, top, mask=there)
            tl.store(stats + (part + split) * 2 + 1, norm, mask=there)


@triton.jit(do_not_specialize=["state_stride", "tokens"])
def verify_attention_combine_kernel(
    state,
    out,
    partial,
    stats,
    window: tl.constexpr,
    state_stride,
    tokens,
    heads: tl.constexpr,
    dim: tl.constexpr,
    dim_block: tl.constexpr,
    block: tl.constexpr,
    splits: tl.constexpr,
    early: tl.constexpr,
    pdl: tl.constexpr,
):
    row = tl.program_id(0) // tokens
    query = tl.program_id(0) % tokens
    head = tl.program_id(1)
    at = tl.arange(0, dim_block)
    part = tl.arange(0, splits)
    if pdl:
        gdc_launch_dependents()
        if not early:
            gdc_wait()
    own = state + row.to(tl.int64) * state_stride
    token = tl.load(own)
    count = tl.load(own + 1)
    root = tl.load(own + 2)
    length = tl.load(own + 3)
    first = first_seen(root, window)
    every = (length + block - 1) // block - first // block
    share = (every + splits - 1) // splits
    used = (every + share - 1) // share
    if early and pdl:  # all do: a kernel that waits for this one waits for those before it
        gdc_wait()
    if (query < count) & (used > 1):
        line = (token + query).to(tl.int64) * heads + head
        there = part < used
        top = tl.load(stats + (line * splits + part) * 2, mask=there, other=-float("inf"))
        norm = tl.load(stats + (line * splits + part) * 2 + 1, mask=there, other=0.0)
        mask = there[:, None] & (at < dim)[None, :]
        total = tl.load(partial + (line * splits + part)[:, None] * dim + at[None, :], mask=mask, other=0.0)
        grow = tl.exp2(top - tl.max(top, 0))
        norms = tl.sum(norm * grow, 0)
        whole = tl.sum(total * grow[:, None], 0) / tl.where(norms > 0.0, norms, 1.0)
        tl.store(out + line * dim + at, whole.to(out.dtype.element_ty), mask=at < dim)


def attend_drafts(
    queries: Tensor,
    cache: Tensor,
    state: Tensor,
    bits: Tensor | None,
    tokens: int,
    window: int,
    scale: float,
    splits: int,
    scratch: DecodeScratch,
    out: Tensor,
    scales: Tensor | None = None,
    early: bool = False,
    varies: bool = False,
    extra: CapAndSinks = PLAIN,
) -> None:
    """Attend with the rows' ``queries`` of [tokens of the step, heads, dim]; results go to ``out``, contiguous.

    ``state`` int32 [rows, HEADER + columns]: each row's header and pages. ``tokens``: the most of a row. ``bits`` int64
    [rows, at least ``tokens``]: the mask of each query from the row's root on (``DraftTree.bits``); None: causal, with
    the root as the first token of a row. ``cache`` and ``scales``: as in ``attend_decodes``. ``window``: as
    ``ModelConfig.windows``, along a query's path. ``early``: whether ``state`` and ``bits`` are written before the
    step's first kernel. ``varies``: whether the next step may have other ``splits``.
    """
    rows = len(state)
    total, heads, dim = queries.shape
    _, _, kv_heads, page_size, _ = cache.shape
    group = heads // kv_heads
    each = _queries(group, tokens)
    blocks = triton.cdiv(tokens, each)
    wide = queries.element_size() == 4
    partial, stats, _ = scratch.room(total, heads, kv_heads, dim, splits)
    pdl = overlapping(queries.device)
    factor, cap = score_factors(scale, extra)
    dim_block = max(16, triton.next_power_of_2(dim))
    block, stages = key_block(dim_block, wide, queries.device)
    verify_attention_kernel[(rows * blocks, kv_heads, splits)](
        queries,
        cache,
        cache if scales is None else scales,
        state,
        state if bits is None else bits,
        queries if extra.sinks is None else extra.sinks,
        out,
        partial,
        stats,
        factor,
        cap,
        window,
        queries.stride(0),
        state.stride(0),
        0 if bits is None else bits.stride(0),
        blocks,
        HEADER,
        heads,
        kv_heads,
        dim,
        dim_block,
        each,
        _lines(group, tokens),
        page_size,
        block,
        0 if varies else splits,  # faster by up to 2.5 %
        splits,
        bits is not None,
        "ieee" if wide else "tf32",
        stages,
        scales is not None,
        bool(extra.cap),
        extra.sinks is not None,
        extra.growth_length,
        early,
        pdl,
        num_warps=4 if dim_block <= 256 else 8,
        launch_pdl=pdl,
    )
    if splits > 1:
        verify_attention_combine_kernel[(rows * tokens, heads)](
            state,
            out,
            partial,
            stats,
            window,
            state.stride(0),
            tokens,
            heads,
            dim,
            dim_block,
            block,
            splits,
            early,
            pdl,
            num_warps=min(
                4 if dim_block <= 256 else 8, max(1, splits * dim_block // 4096)
            ),  # more are slower on an H200
            launch_pdl=pdl,
        )
