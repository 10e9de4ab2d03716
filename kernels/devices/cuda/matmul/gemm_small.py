"""Matrix products of a few tokens, 2 to 64, at nearly the speed of reading the weight.

A program computes the sums of some rows of the weight for all tokens, so that the weight is read once. If there are too
few rows to fill the device, each is split into parts; the part that ends last sums them, always in the same order. A
program prefetches its first tiles of the weight to the L2 cache while the previous kernel ends. Programs that start so
early are distributed unevenly: of a few long ones, two may run on one multiprocessor and none on another. Many short
ones balance, but need more summation. The fastest ``GemmSplit`` depends on the shape
(``kernels.devices.cuda.matmul.autotune`` measures).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.devices.cuda.launch import has_large_shared_memory, overlapping

__all__ = ["MAX_TOKENS", "GemmSplit", "able", "counters", "multiply", "split_options", "suits"]

MAX_TOKENS = 64
_ROWS = 64
_CUTS = 4  # most splits of the tokens
_BLOCK = 128
_STAGES = 4
_MANY = 16384  # outputs that fill the device
_LONG = 4096  # inputs from which cuBLAS is faster with fewer tokens than ...
_FROM = 17
_PART: Final = 1024  # inputs of a short part


@dataclass(frozen=True)
class GemmSplit:
    """A program processes ``rows`` rows of the weight, one of ``splits`` parts of each, ``block`` inputs at a time."""

    rows: int
    block: int
    splits: int
    warps: int


@triton.jit
def _prefetch(place):
    """Prefetch 512 bytes at each address to the L2 cache."""
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], 512; mov.u32 $0, 0; }",
        "=r,l",
        [place.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["tokens", "splits"])
def gemm_small_kernel(
    x,
    weight,
    bias,
    out,
    partial,
    arrived,
    tokens,
    outputs,
    inputs,
    splits,
    token_block: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    stages: tl.constexpr,
    parted: tl.constexpr,
    biased: tl.constexpr,
    gated: tl.constexpr,
    pdl: tl.constexpr,
):
    """``rows`` rows of the weight a program. ``gated``: silu of half of them is multiplied by the other half,
    ``outputs`` rows further.
    """
    split, tile = tl.program_id(0), tl.program_id(1)
    kept: tl.constexpr = rows // 2 if gated else rows  # outputs of a program
    of = tl.arange(0, rows)
    row = tl.minimum(tile * kept + of % kept, outputs - 1) + of // kept * outputs
    token = tl.arange(0, token_block)
    at = tl.arange(0, block)
    share = (inputs // block + splits - 1) // splits
    begin = split * share
    end = tl.minimum(begin + share, inputs // block)
    first = weight + row[:, None].to(tl.int64) * inputs + at[None, :]
    value = x + token[:, None] * inputs + at[None, :]
    there = (token < tokens)[:, None]
    if pdl:
        gdc_launch_dependents()
        if inputs >= 512:
            near = weight + row.to(tl.int64) * inputs + tl.minimum(begin * block, inputs - 512)  # within the row
            _prefetch(near)
            _prefetch(near + 256)
        gdc_wait()
    total = tl.zeros([rows, token_block], tl.float32)
    for index in tl.range(begin, end, num_stages=stages):
        w = tl.load(first + index * block, eviction_policy="evict_first")
        v = tl.load(value + index * block, mask=there, other=0.0)
        total = tl.dot(w, tl.trans(v), total)
    if parted:
        size: tl.constexpr = rows * token_block
        place = of[:, None] * token_block + token[None, :]
        part = partial + tile.to(tl.int64) * splits * size
        tl.store(part + split * size + place, total)
        tl.debug_barrier()
        before = tl.atomic_add(arrived + tile, 1, sem="acq_rel")
        if before < splits - 1:
            return
        tl.debug_barrier()
        tl.store(arrived + tile, 0)
        total = tl.zeros([rows, token_block], tl.float32)
        for number in range(splits):
            total += tl.load(part + number * size + place, cache_modifier=".cg")
    if biased:
        total += tl.load(bias + row).to(tl.float32)[:, None]
    if gated:
        # Rounded as the product is where the activation is an operator of its own.
        total = total.to(out.dtype.element_ty).to(tl.float32)
        gate, up = tl.split(total.reshape(2, kept, token_block).permute(1, 2, 0))
        total = gate * tl.sigmoid(gate) * up
    output = tile * kept + tl.arange(0, kept)
    result = out + token[None, :] * outputs + output[:, None]
    tl.store(result, total.to(out.dtype.element_ty), mask=(token < tokens)[None, :] & (output < outputs)[:, None])


def able(x: Tensor, weight: Tensor) -> bool:
    """Whether this kernel supports the product. ``x`` [tokens, inputs]; ``weight`` [outputs, inputs]."""
    if not 1 < len(x) <= MAX_TOKENS or weight.element_size() != 2 or weight.shape[1] % _BLOCK:
        return False
    return x.is_contiguous() and overlapping(x.device) and has_large_shared_memory(x.device)


def suits(x: Tensor, weight: Tensor, gated: bool) -> bool:
    """Whether this kernel is faster than cuBLAS: measured on an H200, with the shapes of an 8B and a 0.6B model."""
    outputs, inputs = weight.shape
    if not able(x, weight) or (inputs >= _LONG and len(x) < _FROM):
        return False
    return gated or len(x) <= 32 or outputs >= _MANY or inputs >= _MANY // 2 or outputs * inputs <= 1 << 23


def _splits(tokens: int, tiles: int, inputs: int) -> int:
    """The number of parts of a weight's rows."""
    max_programs = 256 if inputs >= _MANY // 2 and tokens <= 32 else 192
    splits = 1
    while 2 * splits * tiles <= max_programs and inputs // (2 * splits) >= 4 * _BLOCK:
        splits *= 2
    return splits


def counters(weight: Tensor) -> Tensor:
    """The counters of finished parts for ``multiply``, here and in gemm_small_tma, which also splits tokens; zero
    between products."""
    return torch.zeros(_CUTS * triton.cdiv(len(weight), _ROWS), dtype=torch.int32, device=weight.device)


def split_options(tokens: int, weight: Tensor, gated: bool) -> dict[str, GemmSplit]:
    """Distinct splits of a product, by name. The first fills the device once or twice."""
    outputs, inputs = weight.shape
    large = gated or (outputs >= _MANY and tokens > 32)
    rows, block = (2 * _ROWS, _BLOCK // 2) if large else (_ROWS, _BLOCK)
    tiles = triton.cdiv(outputs, rows)
    result = {"narrow": GemmSplit(rows, block, _splits(tokens, tiles, inputs), 8 if large else 4)}
    short = GemmSplit(_ROWS, _BLOCK, triton.cdiv(inputs, _PART), 4)
    if short not in result.values():
        result["narrow, short"] = short
    return result


def multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, arrived: Tensor, gated: bool, split: GemmSplit | None = None
) -> Tensor:
    """``x`` [tokens, inputs] -> [tokens, outputs], or half as many. ``arrived``: of ``counters``. ``split``: None for
    the first of ``split_options``.
    """
    outputs, inputs = weight.shape
    split = split or next(iter(split_options(len(x), weight, gated).values()))
    outputs, kept = (outputs // 2, split.rows // 2) if gated else (outputs, split.rows)
    tiles = triton.cdiv(outputs, kept)
    token_block = max(16, triton.next_power_of_2(len(x)))
    out = x.new_empty((len(x), outputs))
    parts = tiles * split.splits * split.rows * token_block
    partial = out if split.splits == 1 else x.new_empty(parts, dtype=torch.float32)
    pdl = overlapping(x.device)
    gemm_small_kernel[(split.splits, tiles)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        partial,
        arrived,
        len(x),
        outputs,
        inputs,
        split.splits,
        token_block,
        split.rows,
        split.block,
        _STAGES,
        split.splits > 1,
        bias is not None,
        gated,
        pdl,
        num_warps=split.warps,
        launch_pdl=pdl,
    )
    return out
