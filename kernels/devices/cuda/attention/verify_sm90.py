"""Verification attention of few rows for compute capability 9.0, where latency dominates because little is read.

``kernels.devices.cuda.attention.verify`` does the same in two kernels for any rows. Here a program processes a key head
and a few queries of a row, and short sequences are not split, so nothing must be combined. The copy engine loads blocks
of keys and values (PTX ISA, "Asynchronous copy" and "mbarrier"); blocks that earlier steps wrote are loaded while the
previous kernel, which writes this step's, still runs. ``wgmma`` computes keys by queries and values by weights, so that
its long dimension is the 64 tokens of a block and not the few queries. Weights of several blocks are computed together,
because that is mostly latency. The part of a longer sequence that finishes last combines all parts.

All programs of a head read its keys and values, so ``verify`` is faster for many rows of long sequences.
"""

from __future__ import annotations

from typing import Final, NamedTuple

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
from kernels.devices.cuda.attention.verify import HEADER, ones
from kernels.devices.cuda.launch import copying

__all__ = ["VerifySplit", "attend_few", "verify_split"]

_BLOCK: Final = 64  # tokens: what wgmma takes
_WARPS: Final = 4  # what wgmma takes
_MIN_LINES: Final = 8  # lines: what wgmma takes
_PROGRAMS: Final = 256  # that run at once, approximately


class VerifySplit(NamedTuple):
    """``lines``: queries of a program, over all heads of its key head. Sequences have up to ``splits`` parts of at
    least ``min_blocks`` blocks. The weights of ``together`` blocks are computed at once, and ``stages`` blocks, a
    multiple, are in flight.
    """

    lines: int = 16
    splits: int = 8
    min_blocks: int = 3
    together: int = 3
    stages: int = 3


def verify_split(rows: int, tokens: int, heads_each: int, kv_heads: int, early: bool) -> VerifySplit:
    """The split for rows of up to ``tokens``. ``heads_each``: query heads a key head, at most ``lines``.

    Without ``early``, more blocks are in flight and parts are longer: waiting for a second round of loads costs more
    than the shared memory that the next kernel loses. Measured.
    """
    split = VerifySplit() if early else VerifySplit(min_blocks=6, stages=6)
    tiles = rows * triton.cdiv(tokens, min(tokens, split.lines // heads_each)) * kv_heads
    return split._replace(splits=1 << max(1, _PROGRAMS // tiles).bit_length() - 1)


@gluon.jit
def _line(table, index, kv_head, kv_heads: gl.constexpr, page_size: gl.constexpr):
    """The line of the cache where the keys of block ``index`` start."""
    page = gl.load(table + index * 64 // page_size)
    return (page * 2 * kv_heads + kv_head) * page_size + index * 64 % page_size


@gluon.jit
def _copy(cache, bar, held, slot, line, below: gl.constexpr, go):
    """Request the keys from ``line`` on, and their values, ``below`` lines further."""
    tma.async_copy_global_to_shared(cache, [line, 0], bar, held.index(2 * slot), pred=go)
    tma.async_copy_global_to_shared(cache, [line + below, 0], bar, held.index(2 * slot + 1), pred=go)


@gluon.jit
def _visible(score, index, end, seen, root, offset, window: gl.constexpr):
    """``score`` [tokens of block ``index``, lines], masked where a line does not attend to the token."""
    node = index * 64 + offset - root
    left = seen[None, :] >> gl.minimum(gl.maximum(node, 0), 63).to(gl.uint64)[:, None]
    path = ((left & 1) != 0) & ((node >= 0) & (node < 64))[:, None]
    before = (node < 0)[:, None]
    if window > 0:
        path = path & (ones(left) <= window)
        before = before & (node[:, None] >= (ones(seen) - window)[None, :])
    return gl.where((before | path) & (index < end), score, -float("inf"))


@gluon.jit
def _joined(partial, stats, used, inside, line, dim: gl.constexpr, lines: gl.constexpr, layout: gl.constexpr):
    """Combine sum and normalizer of the ``used`` parts from ``partial`` and ``stats`` on, always in the same order."""
    top = gl.full([lines], -1e30, gl.float32, layout=gl.SliceLayout(0, layout))
    summed = gl.zeros([lines], gl.float32, gl.SliceLayout(0, layout))
    total = gl.zeros([dim, lines], gl.float32, layout)
    for part in range(0, used, 4):
        parts = ()
        for some in gl.static_range(4):
            there = part + some < used
            base = stats + (part + some) * 2 * lines + line
            t = gl.load(base, mask=(line >= 0) & there, other=-float("inf"), cache_modifier=".cg")
            n = gl.load(base + lines, mask=(line >= 0) & there, other=0.0, cache_modifier=".cg")
            place = partial + (part + some) * dim * lines + inside
            parts += ((t, n, gl.load(place, mask=(inside >= 0) & there, other=0.0, cache_modifier=".cg")),)
        above = top
        for some in gl.static_range(4):
            above = gl.maximum(above, parts[some][0])
        shrink = gl.exp2(top - above)
        summed = summed * shrink
        total = total * shrink[None, :]
        for some in gl.static_range(4):
            grow = gl.exp2(parts[some][0] - above)
            summed += parts[some][1] * grow
            total += parts[some][2] * grow[None, :]
        top = above
    return total, summed


@gluon.jit(do_not_specialize=["state_stride", "bits_stride", "blocks", "splits", "min_blocks"])
def verify_attention_sm90_kernel(
    queries,
    cache,
    state,
    bits,
    out,
    partial,
    stats,
    arrived,
    scale,
    query_stride,
    state_stride,
    bits_stride,
    blocks,
    splits,
    min_blocks,
    window: gl.constexpr,
    header: gl.constexpr,
    heads: gl.constexpr,
    kv_heads: gl.constexpr,
    dim: gl.constexpr,
    each: gl.constexpr,
    lines: gl.constexpr,
    page_size: gl.constexpr,
    together: gl.constexpr,
    stages: gl.constexpr,
    warps: gl.constexpr,
    tree: gl.constexpr,
    early: gl.constexpr,
    pdl: gl.constexpr,
):
    """``each``: queries of a program, the first ``each * heads // kv_heads`` of its ``lines``."""
    block: gl.constexpr = 64
    group: gl.constexpr = heads // kv_heads
    below: gl.constexpr = kv_heads * page_size
    like: gl.constexpr = out.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, lines, 16])
    read: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [warps, 1], [1, 0])
    written: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, warps], [0, 1])
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    tile = gl.program_id(0)
    row = tile // blocks
    first_query = tile % blocks * each
    kv_head = gl.program_id(1)
    split = gl.program_id(2)
    held = gl.allocate_shared_memory(like, [2 * stages, block, dim], cache.layout)
    query_tile = gl.allocate_shared_memory(like, [1, lines, dim], swizzled)
    weights = gl.allocate_shared_memory(like, [together, lines, block], swizzled)
    bars = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    if pdl:
        gdc_launch_dependents()
        if not early:
            gdc_wait()
    own = state + row.to(gl.int64) * state_stride
    token = gl.load(own)
    count = gl.load(own + 1)
    root = gl.load(own + 2)
    length = gl.load(own + 3)
    first = 0 * length
    if window > 0:
        first = gl.maximum(root + 1 - window, 0)
    first_block = first // block
    every = (length + block - 1) // block - first_block
    share = gl.maximum((every + splits - 1) // splits, min_blocks)
    used = (every + share - 1) // share
    if (split >= used) | (first_query >= count):
        return
    for stage in gl.static_range(stages):
        mbarrier.init(bars.index(stage), count=1)
    fence_async_shared()
    gl.thread_barrier()

    # Request blocks that only earlier steps wrote to before the previous kernel has ended.
    table = own + header
    begin = first_block + split * share
    end = gl.minimum(begin + share, first_block + every)
    rounds = (end - begin + together - 1) // together
    number = rounds * together  # missing blocks repeat the last one, so values are finite
    known = length - count
    brought = ()
    for stage in gl.static_range(stages):
        index = gl.minimum(begin + stage, end - 1)
        brought += ((_line(table, index, kv_head, kv_heads, page_size), index),)
    for stage in gl.static_range(stages):
        line, index = brought[stage]
        bar = bars.index(stage)
        mbarrier.expect(bar, 2 * block * dim * 2, pred=stage < number)
        if early:
            _copy(cache, bar, held, stage, line, below, (stage < number) & ((index + 1) * block <= known))
    late = 0 * begin
    if early:
        late = number
        if end * block > known:
            late = gl.maximum(known // block - begin, 0)
    line_of = gl.arange(0, lines, layout=gl.SliceLayout(0, mma))
    query = first_query + line_of // group
    if tree:
        mask = (line_of < each * group) & (query < count)
        seen = gl.load(bits + row.to(gl.int64) * bits_stride + query, mask=mask, other=1).to(gl.uint64, bitcast=True)
    else:
        everything = gl.full([lines], -1, gl.int64, layout=gl.SliceLayout(0, mma)).to(gl.uint64, bitcast=True)
        seen = everything >> (63 - gl.minimum(query, 63)).to(gl.uint64)
    if early and pdl:
        gdc_wait()
    of = gl.arange(0, lines, layout=gl.SliceLayout(1, read))
    at = gl.arange(0, dim, layout=gl.SliceLayout(0, read))
    asking = first_query + of // group
    place = (token + asking).to(gl.int64) * query_stride + (kv_head * group + of % group) * dim
    there = (of < each * group) & (asking < count)
    q = gl.load(queries + place[:, None] + at[None, :], mask=there[:, None], other=0.0)
    for stage in range(late, gl.minimum(stages, number)):
        line = _line(table, gl.minimum(begin + stage, end - 1), kv_head, kv_heads, page_size)
        _copy(cache, bars.index(stage), held, stage, line, below, stage < number)
    query_tile.index(0).store(q)
    fence_async_shared()
    gl.thread_barrier()

    offset = gl.arange(0, block, layout=gl.SliceLayout(1, mma))
    top = gl.full([lines], -float("inf"), gl.float32, layout=gl.SliceLayout(0, mma))
    norm = gl.zeros([block, lines], gl.float32, mma)
    total = gl.zeros([dim, lines], gl.float32, mma)
    slot = 0
    turn = 0
    for step in range(rounds):
        products = ()
        for some in gl.static_range(together):
            mbarrier.wait(bars.index(slot + some), turn)
            score = gl.zeros([block, lines], gl.float32, mma)
            key = held.index(2 * (slot + some))
            products += (warpgroup_mma(key, query_tile.index(0).permute((1, 0)), score, is_async=True),)
        if together > 1:
            products = warpgroup_mma_wait(0, deps=products)
        else:
            products = (warpgroup_mma_wait(0, deps=[products[0]]),)
        highest = gl.full([block, lines], -1e30, gl.float32, layout=mma)  # all keys of a block may be masked for a line
        scores = ()
        for some in gl.static_range(together):
            index = begin + step * together + some
            score = products[some] * scale
            if (window > 0) | ((index + 1) * block > root) | (index >= end):
                score = _visible(score, index, end, seen, root, offset, window)
            highest = gl.maximum(highest, score)
            scores += (score,)
        above = gl.maximum(top, gl.max(highest, 0))
        shrink = gl.exp2(top - above)
        norm = norm * shrink[None, :]
        for some in gl.static_range(together):
            weight = gl.exp2(scores[some] - above[None, :])
            norm = norm + weight
            weights.index(some).permute((1, 0)).store(weight.to(like))
        top = above
        fence_async_shared()
        gl.thread_barrier()
        total = total * shrink[None, :]
        for some in gl.static_range(together):
            value = held.index(2 * (slot + some) + 1).permute((1, 0))
            total = warpgroup_mma(value, weights.index(some).permute((1, 0)), total, is_async=True)
        total = warpgroup_mma_wait(0, deps=[total])
        gl.thread_barrier()  # all warps have read the blocks
        for some in gl.static_range(together):
            following = step * together + some + stages
            if following < number:
                line = _line(table, gl.minimum(begin + following, end - 1), kv_head, kv_heads, page_size)
                mbarrier.expect(bars.index(slot + some), 2 * block * dim * 2, pred=following < number)
                _copy(cache, bars.index(slot + some), held, slot + some, line, below, following < number)
        slot += together
        if slot == stages:
            slot = 0
            turn ^= 1

    summed = gl.sum(norm, 0)
    if used > 1:
        inside = gl.arange(0, dim, layout=gl.SliceLayout(1, mma))[:, None] * lines + line_of[None, :]
        mine = tile * kv_heads + kv_head
        parts = partial + mine.to(gl.int64) * splits * dim * lines
        part_stats = stats + mine.to(gl.int64) * splits * 2 * lines
        gl.store(parts + split * dim * lines + inside, total)
        gl.store(part_stats + split * 2 * lines + line_of, top)
        gl.store(part_stats + split * 2 * lines + lines + line_of, summed)
        gl.thread_barrier()
        earlier = gl.atomic_add(arrived + mine, 1, sem="acq_rel")
        if earlier < used - 1:
            return
        gl.thread_barrier()
        gl.store(arrived + mine, 0)
        total, summed = _joined(parts, part_stats, used, inside, line_of, dim, lines, mma)
    found = gl.convert_layout((total / summed[None, :]).to(like), written)
    of = gl.arange(0, lines, layout=gl.SliceLayout(0, written))
    at = gl.arange(0, dim, layout=gl.SliceLayout(1, written))
    asking = first_query + of // group
    result = (token + asking).to(gl.int64) * heads + kv_head * group + of % group
    there = (of < each * group) & (asking < count)
    gl.store(out + result[None, :] * dim + at[:, None], found, mask=there[None, :])


def attend_few(
    queries: Tensor,
    cache: Tensor,
    state: Tensor,
    bits: Tensor | None,
    tokens: int,
    window: int,
    scale: float,
    scratch: DecodeScratch,
    out: Tensor,
    early: bool = False,
    split: VerifySplit | None = None,
) -> Tensor:
    """As ``kernels.devices.cuda.attention.verify.attend_drafts``, in 16 bits, for head dimensions 64 or 128, up to 16
    query heads a key head, and pages of a multiple of 64 tokens. ``split``: None for the fastest measured. -> ``out``.
    """
    rows, (_, heads, dim) = len(state), queries.shape
    count, _, kv_heads, page_size, _ = cache.shape
    group = heads // kv_heads
    split = split or verify_split(rows, tokens, group, kv_heads, early)
    each = min(tokens, split.lines // group)
    lines, blocks = max(_MIN_LINES, triton.next_power_of_2(each * group)), triton.cdiv(tokens, each)
    partial, stats, arrived = scratch.room(rows * blocks * kv_heads, lines, 1, dim, split.splits)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    described = TensorDescriptor(cache, [count * 2 * kv_heads * page_size, dim], [dim, 1], [_BLOCK, dim], layout)
    pdl = copying(queries.device)
    verify_attention_sm90_kernel[(rows * blocks, kv_heads, split.splits)](
        queries,
        described,
        state,
        state if bits is None else bits,
        out,
        partial,
        stats,
        arrived,
        scale * 1.4426950408889634,
        queries.stride(0),
        state.stride(0),
        0 if bits is None else bits.stride(0),
        blocks,
        split.splits,
        split.min_blocks,
        window,
        HEADER,
        heads,
        kv_heads,
        dim,
        each,
        lines,
        page_size,
        split.together,
        split.stages,
        _WARPS,
        bits is not None,
        early,
        pdl,
        num_warps=_WARPS,
        launch_pdl=pdl,
    )
    return out
