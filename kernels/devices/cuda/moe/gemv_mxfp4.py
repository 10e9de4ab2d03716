"""Products of single tokens and their experts in MXFP4, without the matrix unit.

A token takes a few experts, and each weight is read once: a product is bound by the memory if few instructions are
spent on a number. A word has eight numbers; those at i and i + 4 become two float16 in one word by shifts and masks: an
e2m1 number is a float16 that is 2^14 times too small, also where it is subnormal. A thread multiplies whole blocks of
32 inputs, whose products with the token are summed in float16. The token is scaled by a power of two for each block, so
that its numbers are exact and no sum overflows, and the block's power of two multiplies the sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.devices.cuda.launch import overlapping
from kernels.devices.cuda.matmul.packed_arithmetic import by_e2m1, halves, quarters
from kernels.devices.experts import ClampedGate

__all__ = ["MicroTiling", "multiply"]

_BLOCK: Final = 32  # inputs that share a power of two
_WORDS: Final = 4  # of 32 bits, of a block


@dataclass(frozen=True)
class MicroTiling:
    """A program has ``rows`` outputs of one pair, each warp some of them."""

    rows: int
    warps: int


@gluon.jit
def _power(exponents):
    """2^(n - 127) for the exponents n of blocks."""
    bits = gl.where(exponents == 0, 0x00400000, exponents.to(gl.int32) << 23)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _prepared(x, at, there, flat: gl.constexpr, beside: gl.constexpr):
    """A token's numbers at ``at`` [32, 4, 8] as four of [32, 4] words each, of numbers i and i + 4, and the factors of
    blocks."""
    value = gl.load(x + at, mask=there, other=0.0).to(gl.float32)
    largest = gl.max(gl.max(gl.abs(value), 2), 1)
    bits = gl.maximum(largest.to(gl.int32, bitcast=True) & 0x7F800000, 0x0D800000)
    value *= gl.expand_dims(gl.expand_dims(16384.0 / bits.to(gl.float32, bitcast=True), 1), 2)
    low, high = gl.split(value.reshape(32, 4, 2, 4).permute(0, 1, 3, 2))
    one, two, three, four = quarters(halves(low, high).reshape(32, 4, 2, 2), flat)
    return one, two, three, four, gl.convert_layout(bits.to(gl.float32, bitcast=True), beside)[None, :]


@gluon.jit
def moe_gemv_mxfp4_kernel(
    x,
    words,
    scales,
    biases,
    experts,
    out,
    alpha,
    limit,
    outputs,
    each: gl.constexpr,
    blocks: gl.constexpr,
    rows: gl.constexpr,
    warps: gl.constexpr,
    biased: gl.constexpr,
    gated: gl.constexpr,
    pdl: gl.constexpr,
):
    """``out`` [pairs, outputs] of ``x`` [pairs / each, 32 * blocks], ``words`` int32 [experts, outputs, 4 * blocks],
    ``scales`` uint8 [experts, outputs, blocks], ``biases`` [experts, outputs] and ``experts`` int32 [pairs]. ``gated``:
    the weight has twice the ``outputs``: gates, then the others, of ``ClampedGate``.
    """
    like: gl.constexpr = out.dtype.element_ty
    held: gl.constexpr = gl.BlockedLayout([rows // warps, 1, 4], [1, 32, 1], [warps, 1, 1], [2, 1, 0])
    sums: gl.constexpr = gl.SliceLayout(2, held)
    beside: gl.constexpr = gl.SliceLayout(0, sums)
    flat: gl.constexpr = gl.SliceLayout(0, held)
    token: gl.constexpr = gl.BlockedLayout([1, 4, 8], [32, 1, 1], [warps, 1, 1], [2, 1, 0])
    lead: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, token))
    turns: gl.constexpr = (blocks + 31) // 32

    of = gl.arange(0, rows, layout=gl.SliceLayout(1, sums))
    if gated:  # a gate and the number that it multiplies are neighbours
        place = gl.minimum(gl.program_id(0) * (rows // 2) + of // 2, outputs - 1)
        row, every = of % 2 * outputs + place, 2 * outputs
    else:
        row, every = gl.minimum(gl.program_id(0) * rows + of, outputs - 1), outputs
    block = gl.arange(0, 32, layout=beside)
    word = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(1, flat)), 1) * 4
    word = gl.expand_dims(word + gl.arange(0, 4, layout=gl.SliceLayout(0, flat))[None, :], 0)
    chunk = gl.expand_dims(gl.expand_dims(gl.arange(0, 32, layout=lead), 1), 2)
    at = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, token))), 0)
    at = chunk * 32 + gl.expand_dims(at, 2) * 8
    number = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, token)))
    at = at + gl.expand_dims(gl.expand_dims(number, 0), 1)

    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    pair = gl.program_id(1)
    line = gl.load(experts + pair).to(gl.int64) * every + row
    first = words + gl.expand_dims(gl.expand_dims(line, 1), 2) * (4 * blocks) + word
    powers = scales + line[:, None] * blocks + block[None, :]
    own = x + (pair // each).to(gl.int64) * (32 * blocks)
    now = gl.load(first, mask=word < 4 * blocks, other=0, eviction_policy="evict_first")
    power = gl.load(powers, mask=(block < blocks)[None, :], other=0)
    if turns > 1:
        next_now = gl.load(first + 128, mask=word + 128 < 4 * blocks, other=0, eviction_policy="evict_first")
        next_power = gl.load(powers + 32, mask=(block + 32 < blocks)[None, :], other=0)
    total = gl.zeros([rows, 32], gl.float32, sums)
    for turn in gl.static_range(turns):
        if turn + 2 < turns:
            there = word + (turn + 2) * 128 < 4 * blocks
            last = gl.load(first + (turn + 2) * 128, mask=there, other=0, eviction_policy="evict_first")
            there = (block + (turn + 2) * 32 < blocks)[None, :]
            last_power = gl.load(powers + (turn + 2) * 32, mask=there, other=0)
        a, b, c, d, factor = _prepared(own, at + turn * 1024, chunk + turn * 32 < blocks, flat, beside)
        total += by_e2m1(now, a[None, :, :], b[None, :, :], c[None, :, :], d[None, :, :]) * (_power(power) * factor)
        if turn + 1 < turns:
            now, power = next_now, next_power
        if turn + 2 < turns:
            next_now, next_power = last, last_power
    result = gl.sum(total, 1)
    if biased:
        result += gl.load(biases + line).to(gl.float32)
    if gated:
        # Rounded as the product is where the activation is an operator of its own.
        gate, up = gl.split(result.to(like).to(gl.float32).reshape(rows // 2, 2))
        gate = gl.minimum(gate, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit) + 1.0
        result = gate / (1.0 + gl.exp(-alpha * gate)) * up
        there = gl.program_id(0) * (rows // 2) + gl.arange(0, rows // 2, layout=result.type.layout)
    else:
        there = gl.program_id(0) * rows + of
    gl.store(out + pair.to(gl.int64) * outputs + there, result.to(like), mask=there < outputs)


def multiply(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    biases: Tensor | None,
    experts: Tensor,
    gate: ClampedGate | None,
    each: int,
    tiling: MicroTiling = MicroTiling(16, 2),
) -> Tensor:
    """``x`` [pairs / each, inputs] times the weight of each pair's expert -> [pairs, outputs], or the ``gate`` of half
    as many. ``values`` uint8 [experts, outputs, inputs / 2] and ``scales`` uint8 [experts, outputs, inputs / 32]: e2m1
    numbers, and exponents of two. ``experts`` int32 [pairs]."""
    pairs, every, blocks = len(experts), values.shape[1], scales.shape[2]
    outputs = every if gate is None else every // 2
    out = x.new_empty((pairs, outputs))
    pdl = overlapping(x.device)
    moe_gemv_mxfp4_kernel[(triton.cdiv(every, tiling.rows), pairs)](
        x,
        values.view(torch.int32),
        scales,
        x if biases is None else biases,
        experts,
        out,
        0.0 if gate is None else gate.alpha,
        0.0 if gate is None else gate.limit,
        outputs,
        each,
        blocks,
        tiling.rows,
        tiling.warps,
        biases is not None,
        gate is not None,
        pdl,
        num_warps=tiling.warps,
        launch_pdl=pdl,
    )
    return out
