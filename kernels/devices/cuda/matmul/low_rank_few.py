"""The first half of what adapters add to a product of a few tokens: their A.

The kernel runs beside that of the product. The result is the rest of the product's tokens: a token has a number for
each column of all places' B, zeros except for those of its place. The product reads it last. Its kernel would wait for
the whole kernel of A with ``gdc_wait`` before it reads its tokens, which exist earlier; a flag in memory, set when the
kernel before both has ended, lets it begin at once.

The matrices of all places are one weight, which the copy engine loads as for ``gemm_small_tma``: a program requests its
rows before the tokens exist. A program none of whose rows is of a place in use ends at once.
"""

from __future__ import annotations

from typing import Final

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.devices.cuda.launch import copying
from kernels.devices.cuda.matmul.gemm_small_tma import describe

__all__ = ["STEP", "shared_memory", "shrink"]

STEP: Final = 64
"""Numbers of a token that the product reads at a time."""
_ROWS: Final = 64  # of A: what wgmma takes
_BLOCK: Final = 128  # inputs of a stage
_WARPS: Final = 4
_STAGES: Final = 3  # in flight
_SPLITS: Final = 12  # at most
_MIN_BLOCK: Final = 16  # tokens
_ADDED: Final = 8192  # numbers of the parts that are added at once


@gluon.jit(do_not_specialize=["tokens"])
def low_rank_few_kernel(
    x,
    down,
    places,
    low,
    begun,
    partial,
    arrived,
    tokens,
    width,
    inputs: gl.constexpr,
    share: gl.constexpr,
    splits: gl.constexpr,
    rows: gl.constexpr,
    rank: gl.constexpr,
    step: gl.constexpr,
    token_block: gl.constexpr,
    line_block: gl.constexpr,
    row_block: gl.constexpr,
    block: gl.constexpr,
    stages: gl.constexpr,
    group: gl.constexpr,
    warps: gl.constexpr,
    pdl: gl.constexpr,
):
    """``low`` [modules, tokens, width]: the products of ``x`` [tokens, inputs] with ``down`` [lines, inputs], ``rows``
    lines for each place from place 1 on. A program is for some places, or for ``line_block`` lines of one. Only the
    steps of ``step`` numbers up to the last place in use are written. ``places`` were written before the previous
    kernel. ``begun`` [1]: 1 from when ``x`` exists until the next such kernel of this layer."""
    like: gl.constexpr = low.dtype.element_ty
    read: gl.constexpr = (line_block + token_block) * block * 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, token_block, 16])
    spread: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [warps, 1], [1, 0])
    part, tile = gl.program_id(0), gl.program_id(1)
    leads = (part == 0) & (tile == 0)
    held = gl.allocate_shared_memory(like, [stages, line_block, block], down.layout)
    values = gl.allocate_shared_memory(like, [stages, token_block, block], x.layout)
    bars = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(stages):
        mbarrier.init(bars.index(stage), count=1)
    fence_async_shared()
    gl.thread_barrier()
    if pdl:
        # The product's programs start after all programs here have passed this line, and see 0.
        if leads:
            if gl.atomic_xchg(begun, 0) >= 0:
                gdc_launch_dependents()
        else:
            gdc_launch_dependents()
    token = gl.arange(0, token_block, layout=gl.SliceLayout(0, mma))
    together: gl.constexpr = max(1, line_block // rows)  # places
    chunks: gl.constexpr = (rows + line_block - 1) // line_block
    group_of_places, begins_at = tile // chunks, tile % chunks * line_block
    line = begins_at + gl.arange(0, line_block, layout=gl.SliceLayout(1, mma))
    place = group_of_places * together + line // rows  # 0 is the first that an adapter may have
    here = (token < tokens)[None, :] & (line < together * rows)[:, None]
    of_token = gl.load(places + token, mask=token < tokens, other=0).to(gl.int32) - 1
    reach = ((gl.max(of_token, 0) + 1) * rank + step - 1) // step * step
    own = here & (of_token[None, :] == place[:, None])
    used = gl.max(gl.max(own.to(gl.int32), 1), 0) > 0
    first_line = group_of_places * together * rows + begins_at
    begin = part * share
    count = gl.minimum(share, (inputs + block - 1) // block - begin) * used.to(gl.int32)
    for stage in gl.static_range(stages):
        bar = bars.index(stage)
        mbarrier.expect(bar, read, pred=stage < count)
        at = (begin + stage) * block
        tma.async_copy_global_to_shared(down, [first_line, at], bar, held.index(stage), pred=stage < count)
    if pdl:
        gdc_wait()
        if leads:
            gl.atomic_xchg(begun, 1, sem="release")
    for stage in gl.static_range(stages):
        at = (begin + stage) * block
        tma.async_copy_global_to_shared(x, [0, at], bars.index(stage), values.index(stage), pred=stage < count)
    if part == 0:
        column = place * rank + line % rank
        to = low + (line % rows // rank * tokens)[:, None] * width + token[None, :] * width + column[:, None]
        nothing = gl.zeros([line_block, token_block], like, mma)
        elsewhere = here & (of_token[None, :] != place[:, None])
        gl.store(to, nothing, mask=elsewhere & (column < min(reach, width))[:, None])
    total = gl.zeros([line_block, token_block], gl.float32, mma)
    if used:
        slot = 0
        turn = 0
        for step_number in range(count):
            bar = bars.index(slot)
            mbarrier.wait(bar, turn)
            total = warpgroup_mma(held.index(slot), values.index(slot).permute((1, 0)), total, is_async=True)
            total = warpgroup_mma_wait(0, deps=[total])
            gl.thread_barrier()  # all warps have read the stage
            more = step_number + stages < count
            at = (begin + step_number + stages) * block
            mbarrier.expect(bar, read, pred=more)
            tma.async_copy_global_to_shared(down, [first_line, at], bar, held.index(slot), pred=more)
            tma.async_copy_global_to_shared(x, [0, at], bar, values.index(slot), pred=more)
            slot += 1
            if slot == stages:
                slot = 0
                turn ^= 1
        sums = partial + token[None, :] * rows + (line % rows)[:, None]  # a token has one place
        gl.store(sums + part * tokens * rows, total, mask=own)
        gl.thread_barrier()
        earlier = gl.atomic_add(arrived + tile, 1, sem="acq_rel")
        if earlier < splits - 1:
            return
        gl.thread_barrier()
        gl.store(arrived + tile, 0)
        each = gl.arange(0, token_block, layout=gl.SliceLayout(1, spread))
        row = begins_at + gl.arange(0, row_block, layout=gl.SliceLayout(0, spread))
        of_each = gl.load(places + each, mask=each < tokens, other=0).to(gl.int32) - 1
        its = (of_each >= 0) & (of_each // together == group_of_places) & (each < tokens)
        known = its[:, None] & (row < rows)[None, :]
        result = gl.zeros([token_block, row_block], gl.float32, spread)
        there = partial + each[:, None] * rows + row[None, :]
        for first in range(0, splits, group):
            for more in gl.static_range(group):
                inside = known & (first + more < splits)
                result += gl.load(there + (first + more) * tokens * rows, mask=inside, other=0.0, cache_modifier=".cg")
        line_of = (row // rank * tokens)[None, :] + each[:, None]
        gl.store(low + line_of * width + of_each[:, None] * rank + (row % rank)[None, :], result.to(like), mask=known)


def shared_memory(tokens: int) -> int:
    """Bytes of shared memory that a program of ``shrink`` takes."""
    return _STAGES * (_ROWS + _token_block(tokens)) * _BLOCK * 2 + 1024


def _token_block(tokens: int) -> int:
    return max(_MIN_BLOCK, triton.next_power_of_2(tokens))


def shrink(x: Tensor, places: Tensor, down: Tensor, rank: int, counters: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` [tokens, inputs], up to 64, whose ``places`` are int64 [tokens] -> ``low`` and ``begun`` of ``Extension``
    of ``gemm_small_tma``.
    ``down`` [places, modules * rank, inputs]. ``counters``: int32 zeros, as many as ``down`` has rows and one more."""
    tokens, inputs = x.shape
    rows, width, used = down.shape[1], (len(down) - 1) * rank, down[1:].flatten(0, 1)
    steps = triton.cdiv(inputs, _BLOCK)
    share = max(_STAGES, triton.cdiv(steps, _SPLITS))
    splits = triton.cdiv(steps, share)
    low = x.new_empty((rows // rank * tokens, width))
    partial = torch.empty(splits * tokens * rows, dtype=torch.float32, device=x.device)
    token_block, pdl = _token_block(tokens), copying(x.device)
    row_block = min(_ROWS, max(16, triton.next_power_of_2(rows)))
    tiles = triton.cdiv(len(down) - 1, max(1, _ROWS // rows)) * triton.cdiv(rows, _ROWS)
    low_rank_few_kernel[(splits, tiles)](
        describe(x, token_block, _BLOCK), describe(used, _ROWS, _BLOCK), places, low, counters, partial, counters[1:],
        tokens, width, inputs, share, splits, rows, rank, STEP, token_block, _ROWS, row_block, _BLOCK, _STAGES,
        min(splits, _ADDED // (token_block * row_block)), _WARPS, pdl, num_warps=_WARPS, launch_pdl=pdl,
    )  # fmt: skip
    return low, counters
