"""Matrix products of a few tokens, 2 to 64, with weights loaded by the copy engine (TMA) of compute capability 9.0.

Such a product is bound by reading its weight. The tokens exist only when the previous kernel has ended; the weight
always does. A program therefore requests as many of its rows as fit into shared memory before it waits for that kernel,
and requests the tokens afterwards. The barrier of a stage counts the bytes of both (PTX ISA, "Asynchronous copy" and
"mbarrier"). ``wgmma`` multiplies a stage, and its memory is refilled at once.

One or two programs fill a multiprocessor's shared memory, and there are about as many programs as run at once. If rows
are split into parts for that, the part that finishes last adds them up, always in the same order, or the next kernel
does so. If as many programs as multiprocessors are launched and two fit on one, some multiprocessors seem to get two
and others none; programs of many tokens therefore take a whole multiprocessor. With few rows, tokens are split too: the
weight is then read again from the L2 cache, and there is less to add up.

A norm between two products needs no kernel. The product before applies its gain to the tokens when it adds to the
residual stream. The product after divides its sums by the root mean square, one number a token. So the normed token is
not rounded; instead the sum times the gain is.

Tokens and weights of 8 bits (e4m3) are multiplied as they are, and the sums by the scales of both. The matrix unit adds
such products with fewer bits than float32 has, so each stage is summed by itself.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
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

from kernels.devices.cuda.launch import copying
from kernels.devices.cuda.matmul.scaled_residual import ROWS, Joining, Scaled

__all__ = ["EightBitScales", "Extension", "TmaSplit", "choose_split", "describe", "described", "multiply"]

_ROWS: Final = ROWS  # of the weight: what wgmma takes
_BLOCK_BYTES: Final = 256  # of a row, in a stage
_BLOCK: Final = 128  # inputs of 16 bits
_WARPS: Final = 4  # what wgmma takes
_MIN_BLOCK: Final = 16  # tokens
_MAX_BLOCK: Final = 64
_STAGES: Final = {16: (5, 3), 32: (5, 2), 64: (6, 2)}
"""Stages by tokens and for gated products, so that one or two programs fit on a multiprocessor; measured."""
_ALONE: Final = {16: 3, 32: 3, 64: 4}
"""Stages of gated products with at most one program a multiprocessor."""
_SHALLOW: Final = 3
"""Stages of programs of 64 tokens with few tiles, not gated."""
_MULTIPROCESSORS: Final = 132  # of an H200
_SHARED: Final = (228 - 2 - 1) * 1024  # bytes of a multiprocessor for two programs, without the barriers
_EXTENDED: Final = 10  # stages at most, beside a program for A
_WHOLE: Final = 64  # stages of inputs from which parts pay with adapters, too; measured
_PROGRAMS: Final = {16: 2 * _MULTIPROCESSORS, 32: _MULTIPROCESSORS, 64: _MULTIPROCESSORS}
"""More tokens need more summation. Measured."""
_FEW = 48  # fewer programs are too few
_LONG = 8  # fewest stages of a part, ...
_SHORT = 4  # ... or the same with too few programs
_DEEP = 12  # stages of a program for which a whole multiprocessor pays
_EVEN: Final = {1: (120, range(16, 1 << 20), 11), 3: (360, range(8, 17), 3)}
"""Up to 16 tokens, not gated: one or three programs a multiprocessor, by the total number of programs and of their
stages, with the stages in flight; measured."""


class EightBitScales(NamedTuple):
    """Of tokens and of the weight's rows, float32; ``dtype`` of the product."""

    tokens: Tensor
    rows: Tensor
    dtype: torch.dtype


class Extension(NamedTuple):
    """What a product of ``tokens`` goes on with, after its inputs: ``low`` [modules * tokens, width], the last numbers
    of each token's row; ``up`` [outputs, width]; ``places`` int64 [tokens], of ``rank`` numbers each; ``begun``: of
    ``low_rank_few.low_rank_few_kernel``; ``ends`` int32 [modules] of the modules' outputs, which are multiples of 64.
    ``step``: numbers that are written up to the last place in use; ``shared``: bytes of shared memory of a program of
    A."""

    low: Tensor
    up: Tensor
    places: Tensor
    begun: Tensor
    ends: Tensor
    modules: int
    rank: int
    step: int
    shared: int


class TmaSplit(NamedTuple):
    """The split: tokens of a program, parts of the inputs, and stages in flight."""

    tokens: int
    splits: int
    stages: int


@gluon.jit
def _rows_to(bar, weight, held, slot, row, at, outputs, more, gated: gl.constexpr):
    """Request the weight of a stage."""
    if gated:
        tma.async_copy_global_to_shared(weight, [row, at], bar, held.index(2 * slot), pred=more)
        tma.async_copy_global_to_shared(weight, [outputs + row, at], bar, held.index(2 * slot + 1), pred=more)
    else:
        tma.async_copy_global_to_shared(weight, [row, at], bar, held.index(slot), pred=more)


@gluon.jit
def _up_to(bar, up, held, slot, number, row, outputs, more, step: gl.constexpr, gated: gl.constexpr):
    """Request B for stage ``number`` of what follows the inputs. Of a gated product each stage is for one half of the
    rows, and the other half is read beyond the last output: zeros."""
    if gated:
        half = number % 2
        at = number // 2 * step
        beyond = 2 * outputs
        tma.async_copy_global_to_shared(up, [row + half * beyond, at], bar, _narrowed(held, 2 * slot, step), pred=more)
        other = beyond + row - half * outputs
        tma.async_copy_global_to_shared(up, [other, at], bar, _narrowed(held, 2 * slot + 1, step), pred=more)
    else:
        tma.async_copy_global_to_shared(up, [row, number * step], bar, _narrowed(held, slot, step), pred=more)


@gluon.jit
def _low_to(bar, low, values, slot, number, first, tokens, module, beside, more, step: gl.constexpr,
            gated: gl.constexpr):  # fmt: skip
    """Request the results of A for stage ``number`` of what follows the inputs."""
    line, at = module, number * step
    if gated:
        line, at = module + number % 2 * (beside - module), number // 2 * step
    tma.async_copy_global_to_shared(low, [line * tokens + first, at], bar, _narrowed(values, slot, step), pred=more)


@gluon.jit
def _narrowed(held, slot, columns: gl.constexpr):
    """The first ``columns`` numbers of each row of a stage, one swizzled tile."""
    whole = held.index(slot)
    return whole._reinterpret(whole.dtype, [whole.shape[0], columns], whole.layout)


@gluon.jit
def _factors(squares, first, tokens, inputs, eps, token_block: gl.constexpr, tiles: gl.constexpr,
             tile_block: gl.constexpr, warps: gl.constexpr):  # fmt: skip
    """The factor of each token's norm."""
    spread: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [warps, 1], [1, 0])
    token = first + gl.arange(0, token_block, layout=gl.SliceLayout(1, spread))
    tile = gl.arange(0, tile_block, layout=gl.SliceLayout(0, spread))
    here = (token < tokens)[:, None] & (tile < tiles)[None, :]
    some = gl.load(squares + token[:, None] * tiles + tile[None, :], mask=here, other=0.0, cache_modifier=".cg")
    return gl.rsqrt(gl.sum(some, 1) / inputs + eps)


@gluon.jit(do_not_specialize=["tokens", "splits"])
def gemm_small_tma_kernel(
    x,
    weight,
    bias,
    out,
    partial,
    arrived,
    before,
    gain,
    scaled,
    squares,
    token_scales,
    row_scales,
    low,
    up,
    places,
    begun,
    ends,
    eps,
    tokens,
    outputs,
    inputs,
    splits,
    bits: gl.constexpr,
    token_block: gl.constexpr,
    rows: gl.constexpr,
    block: gl.constexpr,
    stages: gl.constexpr,
    warps: gl.constexpr,
    parted: gl.constexpr,
    biased: gl.constexpr,
    gated: gl.constexpr,
    left: gl.constexpr,
    tiles: gl.constexpr,
    tile_block: gl.constexpr,
    adds: gl.constexpr,
    begins: gl.constexpr,
    modules: gl.constexpr,
    rank: gl.constexpr,
    step_size: gl.constexpr,
    pdl: gl.constexpr,
):
    """``rows`` outputs of ``token_block`` tokens a program. ``gated``: silu of the product is multiplied by that of the
    rows ``outputs`` further. Elements outside of ``x`` and ``weight`` are read as zeros. ``left``: parts are stored
    separately, float32 [splits, tokens, outputs]. ``tiles``, if not 0: ``x`` must be divided by its root mean square,
    from sums of squares ``before`` [tokens, tiles]. ``adds``: the product is added to ``out`` in place. ``begins``: the
    sum times ``gain`` is stored in ``scaled``, its sums of squares in ``squares``. ``bits``: of a number of ``x`` and
    of the ``weight``; with 8 ``token_scales`` [tokens] and ``row_scales`` [outputs], or twice as many, multiply sums.
    ``modules``, if not 0: the products of ``low`` and ``up`` are added, as ``Extension`` says.
    """
    like: gl.constexpr = out.dtype.element_ty
    halves: gl.constexpr = 2 if gated else 1
    size: gl.constexpr = rows * token_block
    kind: gl.constexpr = gl.float8e4nv if bits == 8 else like
    read: gl.constexpr = (halves * rows + token_block) * block * (bits // 8)  # bytes of a stage
    added: gl.constexpr = (halves * rows + token_block) * step_size * (bits // 8)  # ... of what follows the inputs
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, token_block, 256 // bits])
    beside: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, warps], [0, 1])
    split, tile = gl.program_id(0), gl.program_id(1)
    row = tile * rows
    first = gl.program_id(2) * token_block
    steps = (inputs + block - 1) // block
    share = (steps + splits - 1) // splits
    begin = split * share
    count = gl.minimum(share, steps - begin)
    held = gl.allocate_shared_memory(kind, [stages * halves, rows, block], weight.layout)
    values = gl.allocate_shared_memory(kind, [stages, token_block, block], x.layout)
    bars = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(stages):
        mbarrier.init(bars.index(stage), count=1)
    fence_async_shared()
    gl.thread_barrier()
    if pdl:
        gdc_launch_dependents()
    for stage in gl.static_range(stages):
        bar = bars.index(stage)
        mbarrier.expect(bar, read, pred=stage < count)
        _rows_to(bar, weight, held, stage, row, (begin + stage) * block, outputs, stage < count, gated)
    output = row + gl.arange(0, rows, layout=gl.SliceLayout(1, beside))
    if begins:
        times = gl.load(gain + output, mask=output < outputs, other=0.0).to(gl.float32)
    if modules > 0:
        count = gl.maximum(count, 0)
        module = 0
        beside_module = 0
        for earlier_module in gl.static_range(modules - 1):
            end = gl.load(ends + earlier_module)
            module += (row >= end).to(gl.int32)
            beside_module += (outputs + row >= end).to(gl.int32)
    if pdl:
        if modules > 0:
            while gl.load(begun, volatile=True) == 0:
                pass
        else:
            gdc_wait()
    for stage in gl.static_range(stages):
        at = (begin + stage) * block
        tma.async_copy_global_to_shared(x, [first, at], bars.index(stage), values.index(stage), pred=stage < count)
    more_stages = 0
    if modules > 0:  # after the last of the inputs, which the last part has
        spread: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
        each = gl.arange(0, 64, layout=spread)
        last = gl.max(gl.load(places + each, mask=each < tokens, other=0, cache_modifier=".cg"), 0).to(gl.int32)
        more_stages = (last * rank + step_size - 1) // step_size * halves * (split == splits - 1).to(gl.int32)
        for stage in gl.static_range(stages):
            more = (stage >= count) & (stage < count + more_stages)
            mbarrier.expect(bars.index(stage), added, pred=more)
            _up_to(bars.index(stage), up, held, stage, stage - count, row, outputs, more, step_size, gated)
    token = first + gl.arange(0, token_block, layout=gl.SliceLayout(0, beside))
    here = (token < tokens)[None, :] & (output < outputs)[:, None]
    result = token[None, :] * outputs + output[:, None]
    if adds:  # what is needed last is asked for first
        kept = gl.load(out + result, mask=here, other=0.0, cache_modifier=".cg")
    if tiles > 0:
        found = _factors(before, first, tokens, inputs, eps, token_block, tiles, tile_block, warps)
        factor = gl.convert_layout(found, gl.SliceLayout(0, mma))
    total = gl.zeros([rows, token_block], gl.float32, mma)
    other = gl.zeros([rows, token_block], gl.float32, mma)
    nothing = gl.zeros([rows, token_block], gl.float32, mma)
    slot = 0
    turn = 0
    for step in range(count):
        bar = bars.index(slot)
        mbarrier.wait(bar, turn)
        value = values.index(slot).permute((1, 0))
        if bits == 8:
            if gated:
                part = warpgroup_mma(held.index(2 * slot), value, nothing, is_async=True)
                other_part = warpgroup_mma(held.index(2 * slot + 1), value, nothing, is_async=True)
                part, other_part = warpgroup_mma_wait(0, deps=[part, other_part])
                other += other_part
            else:
                part = warpgroup_mma(held.index(slot), value, nothing, is_async=True)
                part = warpgroup_mma_wait(0, deps=[part])
            total += part
        elif gated:
            total = warpgroup_mma(held.index(2 * slot), value, total, is_async=True)
            other = warpgroup_mma(held.index(2 * slot + 1), value, other, is_async=True)
            total, other = warpgroup_mma_wait(0, deps=[total, other])
        else:
            total = warpgroup_mma(held.index(slot), value, total, is_async=True)
            total = warpgroup_mma_wait(0, deps=[total])
        gl.thread_barrier()  # all warps have read the stage
        more = step + stages < count
        at = (begin + step + stages) * block
        mbarrier.expect(bar, read, pred=more)
        _rows_to(bar, weight, held, slot, row, at, outputs, more, gated)
        tma.async_copy_global_to_shared(x, [first, at], bar, values.index(slot), pred=more)
        if modules > 0:
            following = step + stages - count
            more = (following >= 0) & (following < more_stages)
            mbarrier.expect(bar, added, pred=more)
            _up_to(bar, up, held, slot, following, row, outputs, more, step_size, gated)
        slot += 1
        if slot == stages:
            slot = 0
            turn ^= 1
    if modules > 0:
        if pdl:
            gdc_wait()  # for the results of A, and before anything is written
        for stage in gl.static_range(stages):
            at_slot = (slot + stage) % stages
            _low_to(bars.index(at_slot), low, values, at_slot, stage, first, tokens, module, beside_module,
                    stage < more_stages, step_size, gated)  # fmt: skip
        for step in range(more_stages):
            bar = bars.index(slot)
            mbarrier.wait(bar, turn)
            value = _narrowed(values, slot, step_size).permute((1, 0))
            if gated:
                total = warpgroup_mma(_narrowed(held, 2 * slot, step_size), value, total, is_async=True)
                other = warpgroup_mma(_narrowed(held, 2 * slot + 1, step_size), value, other, is_async=True)
                total, other = warpgroup_mma_wait(0, deps=[total, other])
            else:
                total = warpgroup_mma(_narrowed(held, slot, step_size), value, total, is_async=True)
                total = warpgroup_mma_wait(0, deps=[total])
            gl.thread_barrier()
            number = step + stages
            more = number < more_stages
            mbarrier.expect(bar, added, pred=more)
            _up_to(bar, up, held, slot, number, row, outputs, more, step_size, gated)
            _low_to(bar, low, values, slot, number, first, tokens, module, beside_module, more, step_size, gated)
            slot += 1
            if slot == stages:
                slot = 0
                turn ^= 1
    of = gl.arange(0, rows, layout=gl.SliceLayout(1, mma))
    at = gl.arange(0, token_block, layout=gl.SliceLayout(0, mma))
    if left:
        if tiles > 0:
            total = total * factor[None, :]
        place = (split * tokens + first + at[None, :]) * outputs + (row + of)[:, None]
        gl.store(partial + place, total, mask=(first + at < tokens)[None, :] & (row + of < outputs)[:, None])
    else:
        if parted:
            place = of[:, None] * token_block + at[None, :]
            number = gl.program_id(2) * gl.num_programs(1) + tile
            part = partial + number.to(gl.int64) * splits * halves * size
            mine = part + split * halves * size
            gl.store(mine + place, total)
            if gated:
                gl.store(mine + size + place, other)
            gl.thread_barrier()
            earlier = gl.atomic_add(arrived + number, 1, sem="acq_rel")
            if earlier < splits - 1:
                return
            gl.thread_barrier()
            gl.store(arrived + number, 0)
            total = gl.zeros([rows, token_block], gl.float32, mma)
            other = gl.zeros([rows, token_block], gl.float32, mma)
            for index in range(splits):
                some = part + index * halves * size
                total += gl.load(some + place, cache_modifier=".cg")
                if gated:
                    other += gl.load(some + size + place, cache_modifier=".cg")
        if tiles > 0:
            total = total * factor[None, :]
            if gated:
                other = other * factor[None, :]
        near = gl.minimum(row + of, outputs - 1)
        if bits == 8:
            of_tokens = gl.load(token_scales + gl.minimum(first + at, tokens - 1))[None, :]
            total *= of_tokens * gl.load(row_scales + near)[:, None]
            if gated:
                other *= of_tokens * gl.load(row_scales + outputs + near)[:, None]
        if biased:
            total += gl.load(bias + near).to(gl.float32)[:, None]
            if gated:
                other += gl.load(bias + outputs + near).to(gl.float32)[:, None]
        if gated:
            # Rounded as the product is where the activation is an operator of its own.
            gate = total.to(like).to(gl.float32)
            total = gate / (1.0 + gl.exp(-gate)) * other.to(like).to(gl.float32)
        made = gl.convert_layout(total.to(like), beside)
        if adds:
            made = (made.to(gl.float32) + kept.to(gl.float32)).to(like)
        gl.store(out + result, made, mask=here)
        if begins:
            wide = made.to(gl.float32)
            gl.store(scaled + result, (wide * times[:, None]).to(like), mask=here)
            square = gl.sum(gl.where(here, wide * wide, 0.0), 0)
            gl.store(squares + token * gl.num_programs(1) + tile, square, mask=token < tokens)


def described(weight: Tensor) -> TensorDescriptor:
    """The copy engine's descriptor of a dense weight [outputs, inputs] of 16 or 8 bits; a row is a multiple of 16
    bytes."""
    return describe(weight, _ROWS)


def describe(dense: Tensor, rows: int, columns: int | None = None) -> TensorDescriptor:
    """The copy engine's descriptor of blocks of ``rows`` and ``columns`` of a matrix of 16 or 8 bits, whose rows are
    contiguous and begin at multiples of 16 bytes; without ``columns``: of the inputs of a stage."""
    size = dense.element_size()
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * size)
    block = [rows, columns or _BLOCK_BYTES // size]
    return TensorDescriptor(dense, list(dense.shape), [dense.stride(0), 1], block, layout)


def _evenly(tiles: int, steps: int) -> TmaSplit | None:
    """A split for up to 16 tokens whose programs end at about the same time on all multiprocessors."""
    for each, (min_programs, count, stages) in _EVEN.items():
        splits = 1 << max(0, (each * _MULTIPROCESSORS // tiles).bit_length() - 1)
        if min_programs <= splits * tiles <= each * _MULTIPROCESSORS and steps // splits in count:
            return TmaSplit(_MIN_BLOCK, splits, stages)
    return None


def choose_split(tokens: int, outputs: int, inputs: int, gated: bool) -> TmaSplit:
    """The split of a product of ``tokens``, 2 to 64, with ``outputs`` outputs."""
    tiles, block = triton.cdiv(outputs, _ROWS), max(_MIN_BLOCK, triton.next_power_of_2(tokens))
    while block > _MIN_BLOCK and tiles <= _FEW:
        tiles, block = 2 * tiles, block // 2
    splits, steps = 1, triton.cdiv(inputs, _BLOCK)
    even = _evenly(tiles, steps) if tokens <= _MIN_BLOCK and not gated else None
    if even is not None:
        return even
    while 2 * splits * tiles <= _PROGRAMS[block]:
        if steps // (2 * splits) < (_SHORT if splits * tiles < _FEW else _LONG):
            break
        splits *= 2
    stages = _STAGES[block][gated]
    if gated and splits * tiles <= _MULTIPROCESSORS:
        stages = _ALONE[block]
    elif not gated and block == _MAX_BLOCK and steps // splits < _DEEP:
        stages = _SHALLOW
    return TmaSplit(block, splits, stages)


def multiply(
    x: Tensor | Scaled,
    weight: TensorDescriptor,
    bias: Tensor | None,
    arrived: Tensor,
    gated: bool,
    left: bool = False,
    joining: Joining | None = None,
    scales: EightBitScales | None = None,
    extension: Extension | None = None,
) -> Tensor:
    """``x`` [tokens, inputs], its rows dense -> [tokens, outputs], or half as many. ``weight``: as ``described``.
    ``arrived``: of ``kernels.devices.cuda.matmul.gemm_small.counters``.

    ``left``, without a bias and not gated: returns the parts if there are several: float32 [parts, tokens, outputs], to
    be summed in order and rounded. ``joining``: the residual stream that the product is added to and that is returned.
    ``scales``: of ``x`` and ``weight`` in e4m3. ``extension``: what adapters add, of 16 bits.
    """
    begun = x if isinstance(x, Scaled) else None
    if isinstance(x, Scaled):
        x = x.rows
    every, inputs = weight.shape
    outputs, halves = (every // 2, 2) if gated else (every, 1)
    tiles = triton.cdiv(outputs, _ROWS)
    bits = 16 if scales is None else 8
    token_block, splits, stages = choose_split(len(x), outputs, inputs * bits // 16, gated)
    if extension is not None:
        steps = triton.cdiv(inputs, _BLOCK)
        if not gated and tiles * triton.cdiv(len(x), token_block) > _FEW and steps < _WHOLE:
            splits, stages = 1, _EXTENDED  # the sum of parts would wait for A, too
        memory = _SHARED - extension.shared
        stages = min(stages, memory // ((halves * _ROWS + token_block) * _BLOCK_BYTES))
    parts = triton.cdiv(len(x), token_block)
    left = left and splits > 1
    assert not left or not (gated or bias is not None or joining), "what follows the sum is left, too"
    if joining is not None:
        out = joining.residual
    else:
        dtype = x.dtype if scales is None else scales.dtype
        out = x if left else torch.empty((len(x), outputs), dtype=dtype, device=x.device)
    size = len(x) * outputs * splits if left else parts * tiles * splits * halves * _ROWS * token_block
    partial = out if splits == 1 else torch.empty(size, dtype=torch.float32, device=x.device)
    following = None if joining is None else joining.following
    pdl = copying(x.device)
    gemm_small_tma_kernel[(splits, tiles, parts)](
        describe(x, token_block),
        weight,
        out if bias is None else bias,
        out,
        partial,
        arrived,
        out if begun is None else begun.squares,
        out if following is None else following.norm.weight,
        out if following is None else following.rows,
        out if following is None else following.squares,
        out if scales is None else scales.tokens,
        out if scales is None else scales.rows,
        out if extension is None else describe(extension.low, token_block, extension.step),
        out if extension is None else describe(extension.up, _ROWS, extension.step),
        out if extension is None else extension.places,
        out if extension is None else extension.begun,
        out if extension is None else extension.ends,
        0.0 if begun is None else begun.norm.eps,
        len(x),
        outputs,
        inputs,
        splits,
        bits,
        token_block,
        _ROWS,
        _BLOCK_BYTES * 8 // bits,
        stages,
        _WARPS,
        splits > 1,
        bias is not None,
        gated,
        left,
        0 if begun is None else begun.squares.shape[1],
        0 if begun is None else triton.next_power_of_2(begun.squares.shape[1]),
        joining is not None,
        following is not None,
        0 if extension is None else extension.modules,
        0 if extension is None else extension.rank,
        0 if extension is None else extension.step,
        pdl,
        num_warps=_WARPS,
        launch_pdl=pdl,
    )
    return partial.view(splits, len(x), outputs) if left else out
