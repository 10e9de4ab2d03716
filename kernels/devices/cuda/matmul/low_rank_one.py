"""The product of one token with what an adapter adds, in one launch.

The first programs multiply the token by the adapter's A, each a few of its rows, as other programs do with the weight.
All others add their rows of B times these sums. A program has two groups of rows, one after the other: while it reads
the second, the sums of A arrive, which take about as long as one group. Without that, each program of the first ones
would wait for them with nothing requested (decision 0107).

A sum is written together with the number of the pass, as one word of 64 bits: a word of this pass is a sum of this
pass. So nothing has to be cleared, and a layer may run this way once a pass. No program waits forever: the
device starts programs in the order of their numbers, and the first ones wait for no others.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.devices.cuda.elementwise.norm_rope_cache import RopeCacheEpilogue
from kernels.devices.cuda.elementwise.norms import Before
from kernels.devices.cuda.launch import overlapping

__all__ = ["Adapter", "multiply", "places_heads"]

_GROUPS: Final = 2
_BLOCK: Final = 2048  # inputs at a time
_MIN_RANK: Final = 16
_MIN_ROWS: Final = 2  # of a group


@triton.jit
def _offset(number, rows: tl.constexpr, dim: tl.constexpr):
    """Of a program's output ``number``, from its first. ``dim`` of heads: half of a group's rows are half a head
    further than the others, so that each has the one that it rotates with; 0: rows follow one another."""
    if dim > 0:
        pairs: tl.constexpr = rows // 2
        inside = number % rows
        return number // rows * pairs + inside % pairs + inside // pairs * (dim // 2)
    else:
        return number


@triton.jit
def low_rank_one_kernel(
    x,
    residual,
    gain,
    weight,
    bias,
    cos,
    sin,
    cache,
    index,
    out,
    places,
    down,
    up,
    ends,
    sums,
    current,
    eps,
    outputs,
    width,
    heads,
    kv_heads,
    inputs: tl.constexpr,
    rank: tl.constexpr,
    rank_block: tl.constexpr,
    modules: tl.constexpr,
    dim: tl.constexpr,
    page_size: tl.constexpr,
    rows: tl.constexpr,
    groups: tl.constexpr,
    block: tl.constexpr,
    biased: tl.constexpr,
    gated: tl.constexpr,
    normed: tl.constexpr,
    adds: tl.constexpr,
    ahead: tl.constexpr,
    pdl: tl.constexpr,
):
    """``rows`` outputs a group, ``groups`` a program. ``gated``, ``normed``, ``adds``, ``ahead``: as of ``gemv_kernel``
    of ``kernels.devices.cuda.matmul.linear``. ``dim`` of heads: rotates them and writes the cache, as
    ``qkv_gemv_kernel`` of ``kernels.devices.cuda.matmul.qkv_projection``; 0: none.

    ``places`` int64 [1]; ``down`` [places, modules * rank, inputs]; ``up`` [outputs, width], of which an adapter has
    ``rank`` numbers from ``place * rank`` on; ``ends`` int32 [modules] of the modules' outputs; ``sums`` int64
    [modules * rank]: float32 in the low half, the pass in the high half; ``current`` int64 [1]: the pass.
    """
    like = out.dtype.element_ty
    halves: tl.constexpr = 2 if gated else 1
    lines: tl.constexpr = modules * rank // halves
    shrinking: tl.constexpr = (lines + rows - 1) // rows
    tiles: tl.constexpr = (inputs + block - 1) // block
    count: tl.constexpr = rows * groups
    half: tl.constexpr = dim // 2
    program = tl.program_id(0)
    shrinks = program < shrinking
    lane = tl.arange(0, rows)
    at = tl.arange(0, block)
    rank_at = tl.arange(0, rank_block)
    if pdl:
        gdc_launch_dependents()
    place = tl.load(places)
    tag = tl.load(current) & 0x7FFFFFFF
    number = (program - shrinking) * count
    if dim > 0:
        pair = number // 2
        number = pair // half * dim + pair % half
    start = tl.where(shrinks, program * rows, number)
    limit = tl.where(shrinks, lines, outputs)
    row = tl.where(shrinks, start + lane, start + _offset(lane, rows, dim))
    source = weight
    if shrinks:
        source = down + place * (modules * rank * inputs)
    first = source + row[:, None].to(tl.int64) * inputs + at[None, :]
    second = first + limit.to(tl.int64) * inputs
    # Request tiles while the previous kernel ends.
    inside = (row < limit)[:, None] & (at < inputs)[None, :]
    w = tl.load(first, mask=inside, other=0.0, eviction_policy="evict_first")
    if gated:
        u = tl.load(second, mask=inside, other=0.0, eviction_policy="evict_first")
    if ahead and inputs > block:
        inside = (row < limit)[:, None] & (block + at < inputs)[None, :]
        next_w = tl.load(first + block, mask=inside, other=0.0, eviction_policy="evict_first")
        if gated:
            next_u = tl.load(second + block, mask=inside, other=0.0, eviction_policy="evict_first")
    each = tl.arange(0, count)
    output = start + _offset(each, rows, dim)
    expands = (output < outputs) & (program >= shrinking)
    part = tl.arange(0, halves)  # gated: 0 the gate, 1 what it multiplies, whose names begin with "second"
    up_row = part[:, None] * outputs + output[None, :]
    b = tl.load(
        up + up_row[:, :, None].to(tl.int64) * width + (place * rank + rank_at)[None, None, :],
        mask=expands[None, :, None] & (rank_at < rank)[None, None, :],
        other=0.0,
    )
    module = 0
    if not gated:
        for earlier in tl.static_range(0, modules - 1):
            module += (start >= tl.load(ends + earlier)).to(tl.int32)
    if pdl:
        gdc_wait()
    part_module = module + part * (modules // 2)  # gate and up may be one module
    tagged_sums = sums + part_module[:, None] * rank + rank_at[None, :]
    needed = (rank_at < rank)[None, :] & (part >= 0)[:, None]
    tagged = tl.load(tagged_sums, mask=needed, other=0, volatile=True)
    if adds:
        onto = tl.load(residual + output, mask=expands, other=0.0)
    if dim > 0:
        turn = pair % half + tl.arange(0, count // 2)
        c = tl.load(cos + turn).to(tl.float32)
        s = tl.load(sin + turn).to(tl.float32)
        slot = tl.load(index)
    total = tl.zeros([rows, block], tl.float32)
    second_total = tl.zeros([rows, block], tl.float32)
    squares = tl.zeros([block], tl.float32)
    group = tl.arange(0, groups)[:, None]
    result = tl.zeros([groups, rows], tl.float32)
    second_results = tl.zeros([groups, rows], tl.float32)
    for tile in tl.static_range(0, tiles * groups):
        inside = (tile % tiles) * block + at < inputs
        if tile == 1 and ahead and inputs > block:
            w = next_w
            if gated:
                u = next_u
        elif tile > 0:
            rows_on = (tile // tiles) * (rows // 2 if dim > 0 else rows)
            if tile < tiles:
                wanted = (row < limit)[:, None] & inside[None, :]
            else:  # programs of A have one group
                wanted = ((row + rows_on < limit) & (program >= shrinking))[:, None] & inside[None, :]
            from_here = rows_on * inputs + (tile % tiles) * block
            w = tl.load(first + from_here, mask=wanted, other=0.0, eviction_policy="evict_first")
            if gated:
                u = tl.load(second + from_here, mask=wanted, other=0.0, eviction_policy="evict_first")
        value = tl.load(x + (tile % tiles) * block + at, mask=inside, other=0.0).to(tl.float32)
        if normed:
            if tile < tiles:
                squares += value * value
            value *= tl.load(gain + (tile % tiles) * block + at, mask=inside, other=0.0).to(tl.float32)
        total += w.to(tl.float32) * value[None, :]
        if gated:
            second_total += u.to(tl.float32) * value[None, :]
        if tile % tiles == tiles - 1:
            found = tl.sum(total, 1)
            second_found = tl.sum(second_total, 1) if gated else found
            if normed:
                if tile < tiles:
                    scale = tl.rsqrt(tl.sum(squares) / inputs + eps)
                found *= scale
                second_found *= scale
            if tile < tiles:
                stores = (row < limit) & shrinks
                word = (tag << 32) | (found.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
                tl.store(sums + row, word, mask=stores)
                if gated:
                    word = (tag << 32) | (second_found.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
                    tl.store(sums + limit + row, word, mask=stores)
            result = tl.where(group == tile // tiles, found[None, :], result)
            if gated:
                second_results = tl.where(group == tile // tiles, second_found[None, :], second_results)
            total = tl.zeros([rows, block], tl.float32)
            second_total = tl.zeros([rows, block], tl.float32)
    if not shrinks:
        missing = tl.max(tl.max((needed & ((tagged >> 32) != tag)).to(tl.int32), 1), 0)
        while missing > 0:
            tagged = tl.load(tagged_sums, mask=needed, other=0, volatile=True)
            missing = tl.max(tl.max((needed & ((tagged >> 32) != tag)).to(tl.int32), 1), 0)
    low = (tagged & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    added = tl.sum(b.to(tl.float32) * tl.where(needed, low, 0.0)[:, None, :], 2)
    result = result.reshape(count) + tl.sum(tl.where(part[:, None] == 0, added, 0.0), 0)
    if biased:
        result += tl.load(bias + output, mask=expands, other=0.0).to(tl.float32)
    # Rounded as the product is where the next operator is a kernel of its own.
    if gated:
        second_result = second_results.reshape(count) + tl.sum(tl.where(part[:, None] == 1, added, 0.0), 0)
        if biased:
            second_result += tl.load(bias + outputs + output, mask=expands, other=0.0).to(tl.float32)
        result = result.to(like).to(tl.float32)
        second_result = second_result.to(like).to(tl.float32)
        result = result * tl.sigmoid(result) * second_result
    if adds:
        result = result.to(like).to(tl.float32) + onto.to(tl.float32)
    if dim > 0:
        head = start // dim
        two = tl.arange(0, 2)[None, :, None]
        result = result.to(like).to(tl.float32).reshape(groups, 2, rows // 2)
        if head < heads + kv_heads:
            cosine, sine = c.reshape(groups, 1, rows // 2), s.reshape(groups, 1, rows // 2)
            left = tl.sum(tl.where(two == 0, result, 0.0), 1)[:, None, :]
            right = tl.sum(tl.where(two == 1, result, 0.0), 1)[:, None, :]
            result = tl.where(two == 0, left * cosine + right * sine, right * cosine - left * sine)
        if head < heads:
            to = out + head * dim
        else:
            # Head `heads + h` is key head h: slot h of the page; values follow the keys in both.
            line = (slot // page_size * (2 * kv_heads) + (head - heads)) * page_size + slot % page_size
            to = cache + line * dim
        tl.store(to + output - head * dim, result.reshape(count).to(like), mask=expands)
    else:
        tl.store(out + output, result.to(like), mask=expands)


class Adapter(NamedTuple):
    """What is added to the product of one token. ``places`` int64 [1]; ``down`` [places, modules * rank, inputs],
    contiguous; ``up`` [outputs, width], an output's numbers of all places; ``ends`` int32 [modules] of the modules'
    outputs; ``sums`` int64 [modules * rank], of the layer; ``current`` int64 [1]: the pass. Outputs of a module are a
    multiple of 16, the most of a program."""

    places: Tensor
    down: Tensor
    up: Tensor
    ends: Tensor
    sums: Tensor
    current: Tensor
    rank: int


def _tiling(inputs: int, gated: bool, normed: bool, adds: bool) -> tuple[int, int, int, bool]:
    """Rows of a group and numbers of a row that a program takes at a time, its warps, and whether it reads two tiles
    ahead; measured."""
    if adds and not gated and _BLOCK < inputs <= 2 * _BLOCK:
        return 4, 2 * _BLOCK, 8, False
    block = min(_BLOCK, triton.next_power_of_2(inputs))
    rows = max(_MIN_ROWS, min(8, 4096 // block // (2 if gated else 1)))
    if normed and inputs > _BLOCK:
        return (rows, block, 4, True) if gated else (2 * rows, block, 8, True)
    return rows, block, 4, False


def places_heads(epilogue: RopeCacheEpilogue) -> bool:
    """Whether ``multiply`` supports heads of this size: a program's rows are pairs of one head."""
    return epilogue.suits(_MIN_ROWS * _GROUPS)


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gated: bool,
    adapter: Adapter,
    *,
    before: Before | None = None,
    residual: Tensor | None = None,
    epilogue: RopeCacheEpilogue | None = None,
) -> Tensor:
    """``x`` [1, inputs] -> [1, outputs], after the norm ``before``, or added to ``residual`` [1, outputs], or the
    queries [1, heads, dim] of ``epilogue``."""
    outputs, inputs = weight.shape
    outputs = outputs // 2 if gated else outputs
    if epilogue is None:
        tiling = _tiling(inputs, gated, before is not None, residual is not None)
        heads = kv_heads = dim = page_size = 0
        out = x.new_empty((1, outputs))
        cos = sin = cache = index = x
    else:
        tiling = _tiling(inputs, False, before is not None, False)
        _, _, kv_heads, page_size, dim = epilogue.cache.shape
        heads, out = epilogue.heads, epilogue.queries(x)
        cos, sin, cache, index = epilogue.cos, epilogue.sin, epilogue.cache, epilogue.index
    rows, block, warps, ahead = tiling
    if epilogue is not None and not epilogue.suits(rows * _GROUPS):
        rows = _MIN_ROWS
    modules = len(adapter.ends)
    lines = modules * adapter.rank // (2 if gated else 1)
    pdl = overlapping(x.device)
    low_rank_one_kernel[(triton.cdiv(lines, rows) + triton.cdiv(outputs, rows * _GROUPS),)](
        x,
        x if residual is None else residual,
        x if before is None else before.gain,
        weight,
        weight if bias is None else bias,
        cos,
        sin,
        cache,
        index,
        out,
        adapter.places,
        adapter.down,
        adapter.up,
        adapter.ends,
        adapter.sums,
        adapter.current,
        0.0 if before is None else before.eps,
        outputs,
        adapter.up.stride(0),
        heads,
        kv_heads,
        inputs,
        adapter.rank,
        max(_MIN_RANK, triton.next_power_of_2(adapter.rank)),
        modules,
        dim,
        page_size,
        rows,
        _GROUPS,
        block,
        bias is not None,
        gated,
        before is not None,
        residual is not None,
        ahead,
        pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return out
