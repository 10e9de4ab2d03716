"""The first half of what adapters add to a product of a few tokens: their A.

It runs while the kernel of the product requests its first rows of the weight. The result is the rest of that product's
tokens: a token has a number for each line of all places' B, zeros but for those of its own place.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.devices.cuda.launch import overlapping

__all__ = ["OUTPUTS", "STEP", "Extension", "counters", "shrink"]

STEP: Final = 128
"""Numbers of a token that the product reads at a time."""
OUTPUTS: Final = 64
"""Outputs of a program of the product, all of one module."""
_LINES: Final = 64  # most rows of A that a program multiplies at a time
_BLOCK: Final = 64  # inputs
_TURN: Final = 2 * _BLOCK  # inputs that are requested at once: more take shared memory that the product fills meanwhile
_PROGRAMS: Final = 128  # of a launch: each runs beside one of the kernels before and after
_SPLITS: Final = 16
_GROUP: Final = 8  # parts that are added at once
_LONG: Final = 512  # inputs of a program, if there are more than so many for each split


@triton.jit(do_not_specialize=["tokens"])
def low_rank_few_kernel(
    x,
    places,
    down,
    low,
    steps,
    partial,
    arrived,
    tokens,
    stride,
    width,
    inputs: tl.constexpr,
    split: tl.constexpr,
    splits: tl.constexpr,
    rows: tl.constexpr,
    rank: tl.constexpr,
    step: tl.constexpr,
    token_block: tl.constexpr,
    line_block: tl.constexpr,
    chunks: tl.constexpr,
    block: tl.constexpr,
    group: tl.constexpr,
    pdl: tl.constexpr,
):
    """``low`` [modules, tokens, width]: the products of ``x`` [tokens, inputs], whose rows are ``stride`` apart, with
    ``down`` [places, rows, inputs] of place 1 and those behind it. ``steps`` [1]: how many ``step`` numbers hold those
    of all places in use; no more are written. A place's rows are divided into ``chunks``."""
    part = tl.program_id(0)
    token = tl.arange(0, token_block)
    inner = tl.arange(0, block)
    here = token < tokens
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    of_token = tl.load(places + token, mask=here, other=0).to(tl.int32)
    last = tl.max(of_token, 0)
    reach = (last * rank + step - 1) // step
    if (part == 0) & (tl.program_id(1) == 0):
        tl.store(steps, reach)
    for number in range(tl.program_id(1), last * chunks, tl.num_programs(1)):
        place = number // chunks + 1
        at = number % chunks * line_block + tl.arange(0, line_block)
        own = of_token == place
        to = token[:, None] * width + ((place - 1) * rank + at % rank + at // rank * (tokens * width))[None, :]
        total = tl.zeros([token_block, line_block], tl.float32)
        stored = here[:, None] & (at < rows)[None, :]
        if tl.max(own.to(tl.int32), 0) > 0:
            first = x + token[:, None] * stride + inner[None, :]
            second = down + place.to(tl.int64) * rows * inputs + (at[None, :] * inputs + inner[:, None])
            mask = (at < rows)[None, :]
            for begin in range(part * split, tl.minimum(part * split + split, inputs), 2 * block):
                # Request all before using any.
                inside = begin + inner < inputs
                a = tl.load(first + begin, mask=own[:, None] & inside[None, :], other=0.0)
                b = tl.load(second + begin, mask=mask & inside[:, None], other=0.0)
                inside = begin + block + inner < inputs
                c = tl.load(first + begin + block, mask=own[:, None] & inside[None, :], other=0.0)
                d = tl.load(second + begin + block, mask=mask & inside[:, None], other=0.0)
                total = tl.dot(a, b, total, input_precision="ieee")
                total = tl.dot(c, d, total, input_precision="ieee")
            sums = partial + token[:, None] * rows + at[None, :]  # a token has one place
            added = own[:, None] & mask
            tl.store(sums + part * tokens * rows, total, mask=added)
            tl.debug_barrier()
            if tl.atomic_add(arrived + number, 1, sem="acq_rel") == splits - 1:
                tl.debug_barrier()
                tl.store(arrived + number, 0)
                total = tl.zeros([token_block, line_block], tl.float32)
                for begin in range(0, splits, group):
                    for more in tl.static_range(group):
                        known = added & (begin + more < splits)
                        there = sums + (begin + more) * tokens * rows
                        total += tl.load(there, mask=known, other=0.0, cache_modifier=".cg")
                tl.store(low + to, total.to(low.dtype.element_ty), mask=stored)
        elif part == 0:
            tl.store(low + to, total.to(low.dtype.element_ty), mask=stored)
    if part == 0:  # the product reads whole steps
        past = last * rank + tl.arange(0, step)
        nothing = tl.zeros([token_block, step], low.dtype.element_ty)
        inside = here[:, None] & ((past < reach * step) & (past < width))[None, :]
        for module in range(tl.program_id(1), rows // rank, tl.num_programs(1)):
            tl.store(low + ((module * tokens + token[:, None]) * width + past[None, :]), nothing, mask=inside)


class Extension(NamedTuple):
    """What a product of ``tokens`` goes on with, behind its inputs: ``low`` [modules * tokens, width], the last
    number of each token's row; ``up`` [outputs, width]; int32 ``steps`` [1] of ``STEP`` numbers that are not all zeros;
    ``ends`` int32 [modules] of the modules' outputs, which are multiples of 64."""

    low: Tensor
    up: Tensor
    steps: Tensor
    ends: Tensor
    modules: int


def counters(down: Tensor) -> Tensor:
    """Counters of finished parts for ``shrink``, zero between products, of ``down`` [places, rows, inputs]."""
    return torch.zeros((len(down) - 1) * _chunks(down), dtype=torch.int32, device=down.device)


def _chunks(down: Tensor) -> int:
    return triton.cdiv(down.shape[1], _LINES)


def shrink(x: Tensor, places: Tensor, down: Tensor, rank: int, arrived: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` [tokens, inputs], up to 64, whose ``places`` are int64 [tokens] -> ``low`` and ``steps`` of
    ``Extension``. ``down`` [places, modules * rank, inputs]; ``arrived``: of ``counters``."""
    tokens, inputs = x.shape
    rows, width = down.shape[1], (len(down) - 1) * rank
    splits = min(max(_SPLITS, inputs // _LONG), triton.cdiv(inputs, _TURN))
    split = triton.cdiv(triton.cdiv(inputs, splits), _TURN) * _TURN
    splits = triton.cdiv(inputs, split)
    low = x.new_empty((rows // rank * tokens, width))
    steps = torch.empty(1, dtype=torch.int32, device=x.device)
    partial = torch.empty(splits * tokens * rows, dtype=torch.float32, device=x.device)
    line_block = min(_LINES, max(16, triton.next_power_of_2(rows)))
    pdl = overlapping(x.device)
    low_rank_few_kernel[(splits, min(len(arrived), max(1, _PROGRAMS // splits)))](
        x, places, down, low, steps, partial, arrived, tokens, x.stride(0), width, inputs, split, splits, rows, rank,
        STEP, max(16, triton.next_power_of_2(tokens)), line_block, _chunks(down), _BLOCK, _GROUP, pdl, num_warps=8,
        num_stages=1, launch_pdl=pdl,
    )  # fmt: skip
    return low, steps
