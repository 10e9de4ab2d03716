"""Decode attention of many rows for compute capability 9.0, by persistent programs with equal work.

The blocks of all rows' and key heads' pages form one list. As many programs as run at once each take an equal range of
it, up to one block, across row boundaries. The copy engine (TMA) loads the blocks into a ring buffer, and the barrier
of each stage counts the bytes (PTX ISA, "Asynchronous copy" and "mbarrier"). ``wgmma`` computes keys by queries and
values by weights, so that its long dimension is the 64 tokens of a block and not the few queries.

A key head of a row that spans several ranges is combined by the program with its beginning, always in the same order
(as tiles of products in Osama et al., "Stream-K", arXiv 2301.03598). The other programs compute these parts first, so
it seldom waits, and only for programs with lower numbers, which start no later.
"""

from __future__ import annotations

from typing import Final

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.devices.cuda.attention.decode import DecodeScratch
from kernels.devices.cuda.launch import copying, multiprocessors

__all__ = ["attend_many"]

_BLOCK: Final = 64  # tokens: what wgmma takes
_WARPS: Final = 4  # what wgmma takes
_MIN_QUERIES: Final = 8  # fewest queries of a product
_PROGRAMS: Final = 2  # of a multiprocessor
_STAGES: Final = 3  # blocks in flight in each program: two programs fit


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _next(
    row, head, tile, length, following, lengths, length_stride, rows, kv_heads: gl.constexpr, window: gl.constexpr
):
    """The place after (row, head, tile) in the list, with the lengths of its row and of the next row."""
    tile += 1
    if tile * 64 + _first(length, window) >= length:
        tile = 0
        head += 1
        if head == kv_heads:
            head = 0
            row += 1
            length = following
            following = gl.load(lengths + gl.minimum(row + 1, rows - 1) * length_stride)
    return row, head, tile, length, following


@gluon.jit
def _first(length, window: gl.constexpr):
    """Start of the first block that a row reads."""
    first = 0 * length
    if window > 0:
        first = gl.maximum(length - window, 0) // 64 * 64
    return first


@gluon.jit
def _page(pages, row, tile, length, page_stride, page_size: gl.constexpr, kv_heads: gl.constexpr, window: gl.constexpr):
    """The line of the cache where the keys of a block begin, of its first key head."""
    position = _first(length, window) + tile * 64
    page = gl.load(pages + row.to(gl.int64) * page_stride + position // page_size)
    return page * (2 * kv_heads * page_size) + position % page_size


@gluon.jit
def _load_kv(
    cache,
    part,
    bar,
    held,
    pieces,
    slot,
    line,
    left,
    kv_heads: gl.constexpr,
    page_size: gl.constexpr,
    dim: gl.constexpr,
    more,
):
    """Request a block of keys and values; if few tokens are ``left`` from its start, only the pieces with tokens."""
    below: gl.constexpr = kv_heads * page_size
    panels: gl.constexpr = dim // 64
    if left >= 64:
        tma.async_copy_global_to_shared(cache, [line, 0], bar, held.index(2 * slot), pred=more)
        tma.async_copy_global_to_shared(cache, [line + below, 0], bar, held.index(2 * slot + 1), pred=more)
    else:
        for piece in gl.static_range(4):
            some = more & (piece * 16 < left)
            for panel in gl.static_range(panels):
                at = [line + piece * 16, panel * 64]
                to = pieces.index((2 * slot * panels + panel) * 4 + piece)
                tma.async_copy_global_to_shared(part, at, bar, to, pred=some)
                at = [line + below + piece * 16, panel * 64]
                to = pieces.index(((2 * slot + 1) * panels + panel) * 4 + piece)
                tma.async_copy_global_to_shared(part, at, bar, to, pred=some)


@gluon.jit
def _expect(bar, left, lines: gl.constexpr, dim: gl.constexpr, more):
    """The bytes of a block, of ``left`` tokens or full, and of its queries."""
    pieces = gl.minimum((left + 15) // 16, 4)
    for count in gl.static_range(1, 5):
        mbarrier.expect(bar, (count * 32 + lines) * dim * 2, pred=more & (pieces == count))


@gluon.jit(
    do_not_specialize=["rows", "page_stride", "length_stride", "query_lines"],
    do_not_specialize_on_alignment=["pages", "lengths"],  # alignment differs between steps in graphs and others
)
def decode_attention_persistent_kernel(
    queries,
    cache,
    part,
    pages,
    lengths,
    out,
    partial,
    stats,
    arrived,
    scale,
    rows,
    page_stride,
    length_stride,
    query_lines,
    window: gl.constexpr,
    heads: gl.constexpr,
    kv_heads: gl.constexpr,
    dim: gl.constexpr,
    lines: gl.constexpr,
    page_size: gl.constexpr,
    rows_block: gl.constexpr,
    stages: gl.constexpr,
    warps: gl.constexpr,
    pdl: gl.constexpr,
):
    """``lines``: queries of a product, of which the first ``heads // kv_heads`` are used."""
    block: gl.constexpr = 64
    group: gl.constexpr = heads // kv_heads
    like: gl.constexpr = out.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, lines, 16])
    per_line: gl.constexpr = gl.SliceLayout(0, mma)
    flat: gl.constexpr = gl.BlockedLayout([rows_block // (32 * warps)], [32], [warps], [0])
    weights_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    held = gl.allocate_shared_memory(like, [2 * stages, block, dim], cache.layout)
    # The same memory in pieces of 16 tokens and 64 numbers, as the engine lays out a block.
    pieces = held._reinterpret(like, [2 * stages * (dim // 64) * 4, 16, 64], part.layout)
    query_tiles = gl.allocate_shared_memory(like, [stages, lines, dim], queries.layout)
    weights = gl.allocate_shared_memory(like, [1, lines, block], weights_layout)
    bars = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(stages):
        mbarrier.init(bars.index(stage), count=1)
    fence_async_shared()
    gl.thread_barrier()
    if pdl:
        gdc_launch_dependents()

    # The range of this program and its start.
    programs = gl.num_programs(0)
    stretch = programs - 1 - gl.program_id(0)
    of = gl.arange(0, rows_block, layout=flat)
    each = gl.load(lengths + of * length_stride, mask=of < rows, other=0)
    tiles = (each - _first(each, window) + block - 1) // block
    through = gl.associative_scan(tiles, 0, _add) * kv_heads
    every = gl.sum(tiles, 0) * kv_heads
    share = every // programs
    rest = every % programs
    begin = stretch * share + gl.minimum(stretch, rest)
    count = share + (stretch < rest).to(gl.int32)
    passed = through <= begin
    row = gl.minimum(gl.sum(passed.to(gl.int32), 0), rows - 1)
    offset = begin - gl.sum(gl.where(passed, tiles, 0), 0) * kv_heads
    length = gl.sum(gl.where(of == row, each, 0), 0)
    following = gl.sum(gl.where(of == gl.minimum(row + 1, rows - 1), each, 0), 0)
    wide = (length - _first(length, window) + block - 1) // block
    head = offset // wide
    tile = offset % wide

    # Request blocks that only earlier steps wrote to before the previous kernel has ended.
    row_at, head_at, tile_at, length_at, following_at = row, head, tile, length, following
    brought = ()
    for _ in gl.static_range(stages):
        line = _page(pages, row_at, tile_at, length_at, page_stride, page_size, kv_heads, window) + head_at * page_size
        brought += ((row_at, head_at, tile_at, length_at, line),)
        row_at, head_at, tile_at, length_at, following_at = _next(
            row_at, head_at, tile_at, length_at, following_at, lengths, length_stride, rows, kv_heads, window
        )
        row_at = gl.minimum(row_at, rows - 1)
    for stage in gl.static_range(stages):
        _, _, tile_of, length_of, line = brought[stage]
        left_of = length_of - _first(length_of, window) - tile_of * block
        _expect(bars.index(stage), left_of, lines, dim, stage < count)
        early = (stage < count) & (left_of > block)
        bar = bars.index(stage)
        _load_kv(cache, part, bar, held, pieces, stage, line, left_of, kv_heads, page_size, dim, early)
    line_at = _page(pages, row_at, tile_at, length_at, page_stride, page_size, kv_heads, window) + head_at * page_size
    if pdl:
        gdc_wait()
    for stage in gl.static_range(stages):
        row_of, head_of, tile_of, length_of, line = brought[stage]
        left_of = length_of - _first(length_of, window) - tile_of * block
        late = (stage < count) & (left_of <= block)
        bar = bars.index(stage)
        _load_kv(cache, part, bar, held, pieces, stage, line, left_of, kv_heads, page_size, dim, late)
        query = row_of * query_lines + head_of * group
        tma.async_copy_global_to_shared(queries, [query, 0], bar, query_tiles.index(stage), pred=stage < count)

    member = gl.arange(0, lines, layout=per_line)
    at = gl.arange(0, dim, layout=gl.SliceLayout(1, mma))
    place = at[:, None] * lines + member[None, :]
    token = gl.arange(0, block, layout=gl.SliceLayout(1, mma))
    nothing = gl.zeros([16, 64], like, gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0]))
    top = gl.full([lines], -float("inf"), gl.float32, layout=per_line)
    norm = gl.zeros([block, lines], gl.float32, mma)
    total = gl.zeros([dim, lines], gl.float32, mma)
    whole = tile == 0
    slot = 0
    turn = 0
    for step in range(count):
        bar = bars.index(slot)
        mbarrier.wait(bar, turn)
        score = gl.zeros([block, lines], gl.float32, mma)
        score = warpgroup_mma(held.index(2 * slot), query_tiles.index(slot).permute((1, 0)), score, is_async=True)
        score = warpgroup_mma_wait(0, deps=[score]) * scale
        left_of = length - _first(length, window) - tile * block
        if left_of <= 48:  # what was not brought is not a number, perhaps
            for piece in gl.static_range(1, 4):
                if piece * 16 >= left_of:
                    for panel in gl.static_range(dim // 64):
                        pieces.index(((2 * slot + 1) * (dim // 64) + panel) * 4 + piece).store(nothing)
        position = _first(length, window) + tile * block + token
        seen = position < length
        if window > 0:
            seen = seen & (position >= length - window)
        score = gl.where(seen[:, None], score, -float("inf"))
        above = gl.maximum(top, gl.max(score, 0))
        weight = gl.exp2(score - above[None, :])
        shrink = gl.exp2(top - above)
        norm = norm * shrink[None, :] + weight
        top = above
        weights.index(0).permute((1, 0)).store(weight.to(like))
        fence_async_shared()
        gl.thread_barrier()
        total = total * shrink[None, :]
        value = held.index(2 * slot + 1).permute((1, 0))
        total = warpgroup_mma(value, weights.index(0).permute((1, 0)), total, is_async=True)
        total = warpgroup_mma_wait(0, deps=[total])
        gl.thread_barrier()  # all warps have read the place
        more = step + stages < count
        left_at = length_at - _first(length_at, window) - tile_at * block
        _expect(bar, left_at, lines, dim, more)
        _load_kv(cache, part, bar, held, pieces, slot, line_at, left_at, kv_heads, page_size, dim, more)
        query = row_at * query_lines + head_at * group
        tma.async_copy_global_to_shared(queries, [query, 0], bar, query_tiles.index(slot), pred=more)
        row_at, head_at, tile_at, length_at, following_at = _next(
            row_at, head_at, tile_at, length_at, following_at, lengths, length_stride, rows, kv_heads, window
        )
        row_at = gl.minimum(row_at, rows - 1)
        line_at = _page(pages, row_at, tile_at, length_at, page_stride, page_size, kv_heads, window)
        line_at += head_at * page_size
        slot += 1
        if slot == stages:
            slot = 0
            turn ^= 1

        left = (length - _first(length, window) + block - 1) // block - 1 - tile
        if (left == 0) | (step == count - 1):
            summed = gl.sum(norm, 0)
            if whole:
                other = stretch
                while left > 0:  # later programs have the rest
                    other += 1
                    left -= share + (other < rest).to(gl.int32)
                    while gl.atomic_add(arrived + other, 0, sem="acquire") == 0:
                        pass
                    gl.thread_barrier()
                    gl.store(arrived + other, 0)
                    there = gl.load(stats + other * 2 * lines + member, cache_modifier=".cg")
                    more_of = gl.load(stats + other * 2 * lines + lines + member, cache_modifier=".cg")
                    added = gl.load(partial + other * dim * lines + place, cache_modifier=".cg")
                    above = gl.maximum(top, there)
                    grow = gl.exp2(there - above)
                    shrink = gl.exp2(top - above)
                    top = above
                    summed = summed * shrink + more_of * grow
                    total = total * shrink[None, :] + added * grow[None, :]
                found = (total / summed[None, :]).to(like)
                result = out + (row.to(gl.int64) * heads + head * group) * dim
                gl.store(result + member[None, :] * dim + at[:, None], found, mask=(member < group)[None, :])
            else:
                gl.store(partial + stretch * dim * lines + place, total)
                gl.store(stats + stretch * 2 * lines + member, top)
                gl.store(stats + stretch * 2 * lines + lines + member, summed)
                gl.thread_barrier()
                gl.atomic_xchg(arrived + stretch, 1, sem="release")
            top = gl.full([lines], -float("inf"), gl.float32, layout=per_line)
            norm = gl.zeros([block, lines], gl.float32, mma)
            total = gl.zeros([dim, lines], gl.float32, mma)
            whole = True
        row, head, tile, length, following = _next(
            row, head, tile, length, following, lengths, length_stride, rows, kv_heads, window
        )


def _describe(base: Tensor, lines: int, block: int, width: int) -> TensorDescriptor:
    dim = base.shape[-1]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    return TensorDescriptor(base, [lines, dim], [dim, 1], [block, width], layout)


def attend_many(
    queries: Tensor,
    cache: Tensor,
    pages: Tensor,
    lengths: Tensor,
    window: int,
    scale: float,
    scratch: DecodeScratch,
    out: Tensor,
    programs: int | None = None,
) -> Tensor:
    """As ``attend_decodes``, in 16 bits, for at most 1024 rows, head dimensions 64 or 128, up to 16 query heads a key
    head, and pages of a multiple of 64 tokens.

    ``lengths`` and ``pages`` must be written before the step's first kernel, since they are read early. ``programs``:
    None for as many as run at once, which is the maximum.
    """
    rows, heads, dim = queries.shape
    count, _, kv_heads, page_size, _ = cache.shape
    programs = programs or _PROGRAMS * multiprocessors(queries.device)
    lines = max(_MIN_QUERIES, triton.next_power_of_2(heads // kv_heads))
    every = count * 2 * kv_heads * page_size
    partial, stats, arrived = scratch.room(programs, lines, 1, dim, 2)
    query_lines = queries.stride(0) // dim
    pdl = copying(queries.device)
    decode_attention_persistent_kernel[(programs,)](
        _describe(queries, (rows - 1) * query_lines + heads, lines, dim),
        _describe(cache, every, _BLOCK, dim),
        _describe(cache, every, 16, 64),
        pages,
        lengths,
        out,
        partial,
        stats,
        arrived,
        scale * 1.4426950408889634,
        rows,
        pages.stride(0),
        lengths.stride(0),
        query_lines,
        window,
        heads,
        kv_heads,
        dim,
        lines,
        page_size,
        max(32 * _WARPS, triton.next_power_of_2(rows)),
        _STAGES,
        _WARPS,
        pdl,
        num_warps=_WARPS,
        launch_pdl=pdl,
    )
    return out
