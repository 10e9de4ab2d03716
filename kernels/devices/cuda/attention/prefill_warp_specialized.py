"""Prefill attention for compute capability 9.0, with specialized warps (Shah et al., FlashAttention-3, arXiv
2407.08608).

One warp issues copies of queries, keys and values (TMA), as early as the buffers allow. Two groups of four warps
process 64 queries of a tile each. A group issues a block's scores and the previous block's product with its values,
then computes the softmax weights while the matrix unit works on that product or on the other group's. Scores, weights
and sums stay in registers.

There is one program for each multiprocessor. Tiles are assigned back and forth, so that all programs have similar work,
and the next tile's data is loaded while one finishes.

Keys and values are in the pages of a cache, or they are made of latent vectors
(``kernels.devices.cuda.attention.latent_prompts``): these lie row after row, and all heads share the rotated part of a
key, whose products are added to those of the plain part.
"""

from __future__ import annotations

from typing import Final

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

from kernels.devices.cuda.attention.prefill import PrefillBlocks
from kernels.devices.cuda.launch import multiprocessors

__all__ = ["attend_made", "attend_prompts"]

_ROWS: Final = 64  # queries of a group of warps, and tokens of a copy: what wgmma takes
_STAGES: Final = 2  # buffered blocks of keys, and of values
_WARPS: Final = 4
_REGISTERS: Final = 168  # of a thread, on average
_GROUP: Final = 240  # of a thread that computes
_ASKING: Final = 24  # of a thread that issues copies
_LAYOUT: Final = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)


@gluon.jit
def _exp2(x):
    """exp2 that flushes denormal numbers to zero: handling them would take three of four instructions."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _tile(blocks, turn, every, heads: gl.constexpr):
    """A program's tile in a turn: its row, first query, number of queries (0 without a tile), their first position, and
    head.
    """
    programs, program = gl.num_programs(0), gl.program_id(0)
    number = turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)
    tile = gl.minimum(number, every - 1)
    block = blocks + tile // heads * 4
    count = gl.where(number < every, gl.load(block + 2), 0)
    return gl.load(block), gl.load(block + 1), count, gl.load(block + 3), tile % heads


@gluon.jit
def _blocks(count, start):
    """Blocks of 128 keys that some query of a tile attends to."""
    return gl.where(count > 0, (start + count + 127) // 128, 0)


@gluon.jit
def _both(cache, bar, pieces, slot, first, second, panels: gl.constexpr, more: gl.constexpr):
    """Request the two halves of a block, which start at the given lines of the cache. ``more``: panels that are
    requested beside them."""
    mbarrier.expect(bar, (panels + more) * 2 * 64 * 64 * 2)
    for panel in gl.static_range(panels):
        to = (slot * panels + panel) * 2
        tma.async_copy_global_to_shared(cache, [first, panel * 64], bar, pieces.index(to))
        tma.async_copy_global_to_shared(cache, [second, panel * 64], bar, pieces.index(to + 1))


@gluon.jit
def _ask(
    queries,
    rotated_queries,
    cache,
    rotated,
    shared,
    blocks,
    pages,
    every,
    page_stride,
    below,
    heads: gl.constexpr,
    kv_heads: gl.constexpr,
    dim: gl.constexpr,
    rope: gl.constexpr,
    page_size: gl.constexpr,
    stages: gl.constexpr,
    ahead: gl.constexpr,
):
    """Load the tiles' queries, and their keys and values in pieces from the last one on. The barriers of loaded data
    come first, then those of consumed data.
    """
    query_tiles, rope_tiles, keys, rope_keys, values, query_bars, key_bars, value_bars = shared
    panels: gl.constexpr = dim // 64
    more: gl.constexpr = rope // 64
    ring = 0
    row, first_query, count, start, head = _tile(blocks, 0, every, heads)
    for turn in range((every + gl.num_programs(0) - 1) // gl.num_programs(0)):
        number = _blocks(count, start)
        table = pages + row.to(gl.int64) * page_stride
        position = gl.maximum(number - 1, 0) * 128
        if rope > 0:
            base = gl.load(table)
            page, other, line = base, base, head * (below // heads)
        else:
            line = head // (heads // kv_heads) * page_size
            page = gl.load(table + position // page_size)
            # After the end of the row there is no page: load the other half again; it is masked for all queries.
            other = gl.load(table + gl.minimum(position + 64, gl.maximum(start + count - 1, 0)) // page_size)
        for group in gl.static_range(2):
            place = turn % ahead * 2 + group
            bar = query_bars.index(place)
            mbarrier.wait(query_bars.index(2 * ahead + place), (turn // ahead) % 2 ^ 1)
            mbarrier.expect(bar, 64 * (dim + rope) * 2)
            at = [first_query + group * 64, head * (dim + rope)]
            tma.async_copy_global_to_shared(queries, at, bar, query_tiles.index(place))
            if rope > 0:
                rope_at = [first_query + group * 64, head * (dim + rope) + dim]
                tma.async_copy_global_to_shared(rotated_queries, rope_at, bar, rope_tiles.index(place))
        row, first_query, count, start, head = _tile(blocks, turn + 1, every, heads)
        before, other_before = 0, 0
        for step in range(number + 1):
            if rope > 0:
                first = line + page + position
                second = first + 64
            else:
                first = page * (2 * below) + line + position % page_size
                second = other * (2 * below) + line + (position + 64) % page_size
            if step < number:
                slot = (ring + step) % stages
                if rope > 0:
                    mbarrier.wait(key_bars.index(stages + slot), (ring + step) // stages % 2 ^ 1)
                    bar = key_bars.index(slot)
                    _both(cache, bar, keys, slot, first, second, panels, more)
                    for half in gl.static_range(2):
                        to = rope_keys.index(slot * 2 + half)
                        tma.async_copy_global_to_shared(rotated, [page + position + half * 64, 0], bar, to)
                    position = gl.maximum(position - 128, 0)
                else:
                    # Read the next block's pages while this one waits for a buffer.
                    position = gl.maximum(position - 128, 0)
                    page = gl.load(table + position // page_size)
                    other = gl.load(table + (position + 64) // page_size)
                    mbarrier.wait(key_bars.index(stages + slot), (ring + step) // stages % 2 ^ 1)
                    _both(cache, key_bars.index(slot), keys, slot, first, second, panels, 0)
            if step > 0:
                slot = (ring + step - 1) % stages
                mbarrier.wait(value_bars.index(stages + slot), (ring + step - 1) // stages % 2 ^ 1)
                bar = value_bars.index(slot)
                _both(cache, bar, values, slot, before + below, other_before + below, panels, 0)
            before, other_before = first, second
        ring += number


@gluon.jit
def _weights(score, top, scale):
    """The weights of each query, the largest score so far, and the factor for earlier weights."""
    above = gl.maximum(top, gl.max(score, 1) * scale)
    above = gl.maximum(above, -1e30)  # all keys of a block may be masked for a query
    return _exp2(score * scale - above[:, None]), above, _exp2(top - above)


@gluon.jit
def _answer(
    shared,
    blocks,
    out,
    scale,
    every,
    out_stride,
    heads: gl.constexpr,
    dim: gl.constexpr,
    rope: gl.constexpr,
    stages: gl.constexpr,
    ahead: gl.constexpr,
    group: gl.constexpr,
):
    """Attend with the queries ``group * 64 ..`` of each tile."""
    query_tiles, rope_tiles, keys, rope_keys, values, query_bars, key_bars, value_bars = shared
    like: gl.constexpr = out.dtype.element_ty
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    total_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, dim, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, total_layout, 2)
    per_query: gl.constexpr = gl.SliceLayout(1, score_layout)
    per_total: gl.constexpr = gl.SliceLayout(1, total_layout)
    beside: gl.constexpr = gl.BlockedLayout([1, 8], [256 // dim, dim // 8], [4, 1], [1, 0])
    member = group * 64 + gl.arange(0, 64, layout=per_query)
    offset = gl.arange(0, 128, layout=gl.SliceLayout(0, score_layout))
    nothing = gl.zeros([64, 128], gl.float32, score_layout)
    ring = 0
    _, next_query, next_count, next_start, next_head = _tile(blocks, 0, every, heads)
    for turn in range((every + gl.num_programs(0) - 1) // gl.num_programs(0)):
        first_query, count, start, head = next_query, next_count, next_start, next_head
        _, next_query, next_count, next_start, next_head = _tile(blocks, turn + 1, every, heads)
        number = _blocks(count, start)
        place = turn % ahead * 2 + group
        query, rope_query = query_tiles.index(place), rope_tiles.index(place)
        mbarrier.wait(query_bars.index(place), turn // ahead % 2)
        if number > 0:
            begin = (number - 1) * 128
            slot = ring % stages
            mbarrier.wait(key_bars.index(slot), ring // stages % 2)
            score = warpgroup_mma(query, keys.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
            if rope > 0:
                score = warpgroup_mma(rope_query, rope_keys.index(slot).permute((1, 0)), score, is_async=True)
            score = warpgroup_mma_wait(0, deps=[score])
            mbarrier.arrive(key_bars.index(stages + slot), count=1)
            score = gl.where((begin + offset)[None, :] <= (start + member)[:, None], score, -float("inf"))
            top = gl.full([64], -float("inf"), gl.float32, layout=per_query)
            weight, top, shrink = _weights(score, top, scale)
            norm = gl.sum(weight, 1)
            weight = gl.convert_layout(weight.to(like), weight_layout)
            total = gl.zeros([64, dim], gl.float32, total_layout)
            slot = (ring + 1) % stages
            mbarrier.wait(key_bars.index(slot), (ring + 1) // stages % 2, pred=number > 1)
            for step in range(1, number):
                begin -= 128
                slot = (ring + step) % stages
                score = warpgroup_mma(query, keys.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
                if rope > 0:
                    score = warpgroup_mma(rope_query, rope_keys.index(slot).permute((1, 0)), score, is_async=True)
                before = (ring + step - 1) % stages
                mbarrier.wait(value_bars.index(before), (ring + step - 1) // stages % 2)
                total = warpgroup_mma(weight, values.index(before), total, is_async=True)
                score = warpgroup_mma_wait(1, deps=[score])
                mbarrier.arrive(key_bars.index(stages + slot), count=1)
                if begin + 127 > start + group * 64:  # there are keys behind the first query
                    score = gl.where((begin + offset)[None, :] <= (start + member)[:, None], score, -float("inf"))
                grown, top, shrink = _weights(score, top, scale)
                norm = norm * shrink + gl.sum(grown, 1)
                # This wait is a loop: the compiler keeps the computation of weights before it, beside the product.
                slot = (ring + step + 1) % stages
                mbarrier.wait(key_bars.index(slot), (ring + step + 1) // stages % 2, pred=step < number - 1)
                total = warpgroup_mma_wait(0, deps=[total])
                mbarrier.arrive(value_bars.index(stages + before), count=1)
                total = total * gl.convert_layout(shrink, per_total)[:, None]
                weight = gl.convert_layout(grown.to(like), weight_layout)
            mbarrier.arrive(query_bars.index(2 * ahead + place), count=1)
            slot = (ring + number - 1) % stages
            mbarrier.wait(value_bars.index(slot), (ring + number - 1) // stages % 2)
            total = warpgroup_mma(weight, values.index(slot), total, is_async=True)
            total = warpgroup_mma_wait(0, deps=[total])
            mbarrier.arrive(value_bars.index(stages + slot), count=1)
            ring += number
            found = (total * gl.convert_layout(1.0 / norm, per_total)[:, None]).to(like)
            of = group * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, beside))
            at = gl.arange(0, dim, layout=gl.SliceLayout(0, beside))
            result = out + (first_query + of).to(gl.int64)[:, None] * out_stride + head * dim + at[None, :]
            gl.store(result, gl.convert_layout(found, beside), mask=(of < count)[:, None])
        else:
            mbarrier.arrive(query_bars.index(2 * ahead + place), count=1)


@gluon.jit(
    do_not_specialize=["every", "page_stride", "below"],
    do_not_specialize_on_alignment=["pages", "blocks"],  # alignment differs between steps in graphs and others
)
def prefill_attention_sm90_kernel(
    queries,
    rotated_queries,
    cache,
    rotated,
    pages,
    blocks,
    out,
    scale,
    every,
    page_stride,
    below,
    out_stride,
    heads: gl.constexpr,
    kv_heads: gl.constexpr,
    dim: gl.constexpr,
    rope: gl.constexpr,
    page_size: gl.constexpr,
    stages: gl.constexpr,
    ahead: gl.constexpr,
    group_registers: gl.constexpr,
    asking_registers: gl.constexpr,
):
    """``every``: number of tiles: blocks times heads. ``below``: lines from a key to its value. ``rope``: numbers of
    the ``rotated`` part of a key, 0 without; with it ``pages`` holds the first line of a row. ``ahead``: tiles whose
    queries there is room for.
    """
    like: gl.constexpr = out.dtype.element_ty
    query_tiles = gl.allocate_shared_memory(like, [2 * ahead, 64, dim], queries.layout)
    keys = gl.allocate_shared_memory(like, [stages, 128, dim], cache.layout)
    values = gl.allocate_shared_memory(like, [stages, 128, dim], cache.layout)
    rope_tiles, rope_keys = query_tiles, keys
    if rope > 0:
        rope_tiles = gl.allocate_shared_memory(like, [2 * ahead, 64, rope], queries.layout)
        rope_keys = gl.allocate_shared_memory(like, [stages, 128, rope], cache.layout)
    query_bars = gl.allocate_shared_memory(gl.int64, [4 * ahead, 1], mbarrier.MBarrierLayout())
    key_bars = gl.allocate_shared_memory(gl.int64, [2 * stages, 1], mbarrier.MBarrierLayout())
    value_bars = gl.allocate_shared_memory(gl.int64, [2 * stages, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(4 * ahead):
        mbarrier.init(query_bars.index(place), count=1)
    for stage in gl.static_range(stages):
        mbarrier.init(key_bars.index(stage), count=1)
        mbarrier.init(value_bars.index(stage), count=1)
        mbarrier.init(key_bars.index(stages + stage), count=2)  # both groups must read it
        mbarrier.init(value_bars.index(stages + stage), count=2)
    fence_async_shared()
    gl.thread_barrier()
    shared = (query_tiles, rope_tiles, keys, rope_keys, values, query_bars, key_bars, value_bars)
    # The same memory in pieces of 64 tokens and 64 numbers, as the engine lays out a block.
    key_pieces = keys._reinterpret(like, [stages * (dim // 64) * 2, 64, 64], cache.layout)
    value_pieces = values._reinterpret(like, [stages * (dim // 64) * 2, 64, 64], cache.layout)
    rope_pieces = key_pieces
    if rope > 0:
        rope_pieces = rope_keys._reinterpret(like, [stages * 2, 64, 64], cache.layout)
    pieces = (query_tiles, rope_tiles, key_pieces, rope_pieces, value_pieces, query_bars, key_bars, value_bars)
    gl.warp_specialize(
        [
            (_answer, (shared, blocks, out, scale, every, out_stride, heads, dim, rope, stages, ahead, 0)),
            (_answer, (shared, blocks, out, scale, every, out_stride, heads, dim, rope, stages, ahead, 1)),
            (
                _ask,
                (
                    queries,
                    rotated_queries,
                    cache,
                    rotated,
                    pieces,
                    blocks,
                    pages,
                    every,
                    page_stride,
                    below,
                    heads,
                    kv_heads,
                    dim,
                    rope,
                    page_size,
                    stages,
                    ahead,
                ),
            ),
        ],
        [4, 1],
        [group_registers, asking_registers],
    )


def attend_prompts(
    queries: Tensor, cache: Tensor, plan: PrefillBlocks, scale: float, out: Tensor, programs: int | None = None
) -> Tensor:
    """As ``attend_prefills``, in 16 bits, without a window, for head dimensions 64 or 128 and pages of a multiple of 64
    tokens. ``programs``: None for as many as run at once.
    """
    tokens, heads, dim = queries.shape
    count, _, kv_heads, page_size, _ = cache.shape
    own = TensorDescriptor(queries, [tokens, heads * dim], [queries.stride(0), 1], [_ROWS, dim], _LAYOUT)
    paged = TensorDescriptor(cache, [count * 2 * kv_heads * page_size, dim], [dim, 1], [_ROWS, 64], _LAYOUT)
    sizes = (kv_heads, dim, 0, page_size)
    return _launch((own, own, paged, paged), plan.pages, plan.blocks, scale, out, sizes, kv_heads * page_size, programs)


def attend_made(
    queries: Tensor,
    both: Tensor,
    rotated: Tensor,
    bases: Tensor,
    blocks: Tensor,
    scale: float,
    out: Tensor,
    programs: int | None = None,
) -> Tensor:
    """Causal attention of ``queries`` [tokens, heads, dim + 64], heads side by side, in 16 bits, to ``out`` [tokens,
    heads, dim]. ``both`` [2, heads, lines, dim]: plain parts of keys, and values. ``rotated`` [lines, 64]: the other
    part of keys. Position 0 of row r is in line ``bases[r]`` (int32), a row's lines are followed by finite ones up to a
    multiple of 128. ``blocks``: as those of ``PrefillBlocks``.
    """
    tokens, heads, width = queries.shape
    _, _, lines, dim = both.shape
    rope, stride = rotated.shape[1], queries.stride(0)
    descriptors = (
        TensorDescriptor(queries, [tokens, heads * width], [stride, 1], [_ROWS, dim], _LAYOUT),
        TensorDescriptor(queries, [tokens, heads * width], [stride, 1], [_ROWS, rope], _LAYOUT),
        TensorDescriptor(both, [2 * heads * lines, dim], [dim, 1], [_ROWS, 64], _LAYOUT),
        TensorDescriptor(rotated, [lines, rope], [rope, 1], [_ROWS, 64], _LAYOUT),
    )
    return _launch(descriptors, bases, blocks, scale, out, (heads, dim, rope, 128), heads * lines, programs)


def _launch(
    descriptors: tuple[TensorDescriptor, ...],
    pages: Tensor,
    blocks: Tensor,
    scale: float,
    out: Tensor,
    sizes: tuple[int, int, int, int],
    below: int,
    programs: int | None,
) -> Tensor:
    """``sizes``: key heads, numbers of a plain part and of a rotated one, tokens of a page."""
    kv_heads, dim, rope, page_size = sizes
    heads = out.shape[1]
    every = len(blocks) * heads
    prefill_attention_sm90_kernel[(min(every, programs or multiprocessors(out.device)),)](
        *descriptors,
        pages,
        blocks,
        out,
        scale * 1.4426950408889634,
        every,
        pages.stride(0),
        below,
        out.stride(0),
        heads,
        kv_heads,
        dim,
        rope,
        page_size,
        _STAGES,
        1 if rope else 2,  # shared memory has no room for more queries beside rotated parts
        _GROUP,
        _ASKING,
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
    )
    return out
