"""Product of one token and a 4-bit weight with many rows, by persistent programs that keep the token in registers.

Preparing and norming the token takes as many instructions as multiplying several rows. So only as many programs run as
the device holds at once, and each takes one block of rows after another. The next block is loaded while one is
multiplied; the first two are requested before the previous kernel has ended. Numbers are represented as in
``kernels.devices.cuda.matmul.gemv_quantized``.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.devices.cuda.elementwise.norms import Before
from kernels.devices.cuda.launch import multiprocessors, overlapping
from kernels.devices.cuda.matmul.gemm_small_quantized import Form
from kernels.devices.cuda.matmul.number_conversions import NIBBLES
from kernels.devices.cuda.matmul.packed_arithmetic import apart, by_nibbles, inverse, joined, largest, whole

__all__ = ["rows_in_turn", "suits"]

_ROWS: Final = 4  # of a program at a time, one of a warp
_WARPS: Final = 4
_PROGRAMS: Final = 2  # programs that fit in the registers of a multiprocessor
_FOURS: Final = 128  # 16 bytes of a row, of which a thread holds 4
_FEWEST: Final = 8192  # outputs


@gluon.jit
def _ready(value, fours: gl.constexpr, beside: gl.constexpr, flat: gl.constexpr):
    """The token in the layout of a row's words, the sums of its halves, and the inverse scales."""
    most_of, scale = inverse(gl.max(largest(value, 2), 1), 32767.0)
    numbers = whole(value * gl.expand_dims(gl.expand_dims(most_of, 1), 2))
    front, back = gl.split(gl.sum(gl.sum(numbers - 0x4B400000, 2).reshape(fours, 2, 2), 2))
    front = gl.convert_layout(front, beside)[None, :]
    back = gl.convert_layout(back, beside)[None, :]
    one, two = gl.split(numbers.reshape(fours, 2, 2, 8).permute(0, 1, 3, 2))
    lower, upper = gl.split(joined(one, two).permute(0, 2, 1))
    a, b = apart(lower, fours, flat, beside)
    c, d = apart(upper, fours, flat, beside)
    return a, b, c, d, front, back, gl.convert_layout(scale, beside)[None, :]


@gluon.jit
def _block(words, scales, zeros, row, end, place, slots, every, length, zeroed: gl.constexpr):
    """Words of the rows before ``end`` and their scales."""
    here = row < end
    at = words + gl.expand_dims(gl.expand_dims(row, 1), 2).to(gl.int64) * length + place
    mask = gl.expand_dims(gl.expand_dims(here, 1), 2) & (place < length)
    word = gl.load(at, mask=mask, other=0, eviction_policy="evict_first")
    slot = slots[None, :] * every + row[:, None]
    pair = gl.load(scales + slot, mask=here[:, None], other=0)
    zero = gl.load(zeros + slot, mask=here[:, None], other=0) if zeroed else pair
    return word, pair, zero


@gluon.jit
def _both(words, scales, zeros, row, place, slots, outputs, every, length, zeroed: gl.constexpr, gated: gl.constexpr):
    """``_block`` of ``row`` and, if ``gated``, of the row that is multiplied by it."""
    word, pair, zero = _block(words, scales, zeros, row, outputs, place, slots, every, length, zeroed)
    other, other_pair, other_zero = word, pair, zero
    if gated:
        further = gl.where(row < outputs, row + outputs, every)  # past the gates there is none
        other, other_pair, other_zero = _block(
            words, scales, zeros, further, every, place, slots, every, length, zeroed
        )
    return word, pair, zero, other, other_pair, other_zero


@gluon.jit
def _found(
    block,
    token,
    norm,
    bias,
    row,
    outputs,
    zeroed: gl.constexpr,
    brain: gl.constexpr,
    biased: gl.constexpr,
    gated: gl.constexpr,
    sums: gl.constexpr,
    like: gl.constexpr,
):
    """Multiply the rows of ``_both`` by the token of ``_ready``."""
    word, pair, zero, other, other_pair, other_zero = block
    a, b, c, d, front, back, scale = token
    here = row < outputs
    found = gl.sum(by_nibbles(word, a, b, c, d, front, back, pair, zero, zeroed, brain, sums) * scale, 1) * norm
    if biased:
        found += gl.load(bias + row, mask=here, other=0.0).to(gl.float32)
    if gated:
        up = by_nibbles(other, a, b, c, d, front, back, other_pair, other_zero, zeroed, brain, sums) * scale
        up = gl.sum(up, 1) * norm
        if biased:
            up += gl.load(bias + outputs + row, mask=here, other=0.0).to(gl.float32)
        # Rounded as the product is where the activation is an operator of its own.
        gate = found.to(like).to(gl.float32)
        found = gate / (1.0 + gl.exp(-gate)) * up.to(like).to(gl.float32)
    return found.to(like)


@gluon.jit
def _standing(
    x,
    residual,
    summed,
    gain,
    words,
    scales,
    zeros,
    bias,
    out,
    eps,
    outputs,
    every,
    length: gl.constexpr,
    rows: gl.constexpr,
    warps: gl.constexpr,
    fours: gl.constexpr,
    width: gl.constexpr,
    zeroed: gl.constexpr,
    brain: gl.constexpr,
    biased: gl.constexpr,
    gated: gl.constexpr,
    normed: gl.constexpr,
    pdl: gl.constexpr,
):
    """As ``kernels.devices.cuda.matmul.gemv_quantized._single``. ``fours``: 16 bytes of a row, no fewer than there
    are."""
    like: gl.constexpr = out.dtype.element_ty
    held: gl.constexpr = gl.BlockedLayout([rows // warps, 1, 4], [1, 32, 1], [warps, 1, 1], [2, 1, 0])
    sums: gl.constexpr = gl.SliceLayout(2, held)
    beside: gl.constexpr = gl.SliceLayout(0, sums)
    flat: gl.constexpr = gl.SliceLayout(0, held)
    many: gl.constexpr = max(2, min(8, fours * 8 // (32 * warps)))
    token: gl.constexpr = gl.BlockedLayout([1, 4, many], [4 * many, 1, 8 // many], [warps, 1, 1], [2, 1, 0])
    lead: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, token))
    chunks: gl.constexpr = length // 4
    tile: gl.constexpr = width // 8  # fours of words that share their slots

    step = gl.num_programs(0) * rows
    row = gl.program_id(0) * rows + gl.arange(0, rows, layout=gl.SliceLayout(1, sums))
    slots = gl.minimum(gl.arange(0, fours, layout=beside) // tile, (chunks - 1) // tile)
    place = gl.expand_dims(gl.arange(0, fours, layout=gl.SliceLayout(1, flat)), 1) * 4
    place = gl.expand_dims(place + gl.arange(0, 4, layout=gl.SliceLayout(0, flat))[None, :], 0)
    chunk = gl.arange(0, fours, layout=lead)
    at = (chunk // tile * (4 * width) + chunk % tile * 8)[:, None]
    at = at + gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, token)))[None, :] * width
    number = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, token)))
    at = gl.expand_dims(at, 2) + gl.expand_dims(gl.expand_dims(number, 0), 1)
    inside = gl.expand_dims(gl.expand_dims(chunk, 1), 2) < chunks

    if pdl:
        gdc_launch_dependents()
    block = _both(words, scales, zeros, row, place, slots, outputs, every, length, zeroed, gated)
    after = _both(words, scales, zeros, row + step, place, slots, outputs, every, length, zeroed, gated)
    if normed:
        gamma = gl.load(gain + at, mask=inside, other=0.0)
    if pdl:
        gdc_wait()

    value = gl.load(x + at, mask=inside, other=0.0)
    if normed:
        more = gl.load(residual + at, mask=inside, other=0.0)
        value = (value.to(gl.float32) + more.to(gl.float32)).to(value.dtype)
        gl.store(summed + at, value, mask=inside & (gl.program_id(0) == 0))
    value = value.to(gl.float32)
    norm = 1.0
    if normed:
        squares = gl.sum(gl.sum(gl.sum(value * value, 2), 1), 0)
        norm = gl.rsqrt(squares / (chunks * 32) + eps)
        value *= gamma.to(gl.float32)
    ready = _ready(value, fours, beside, flat)
    for begin in range(gl.program_id(0) * rows, outputs, 2 * step):
        found = _found(block, ready, norm, bias, row, outputs, zeroed, brain, biased, gated, sums, like)
        block = _both(words, scales, zeros, row + 2 * step, place, slots, outputs, every, length, zeroed, gated)
        gl.store(out + row, found, mask=row < outputs)
        if begin + step < outputs:
            found = _found(after, ready, norm, bias, row + step, outputs, zeroed, brain, biased, gated, sums, like)
            gl.store(out + row + step, found, mask=row + step < outputs)
        after = _both(words, scales, zeros, row + 3 * step, place, slots, outputs, every, length, zeroed, gated)
        row += 2 * step


def suits(form: Form, gated: bool) -> bool:
    """Whether it may be faster than ``kernels.devices.cuda.matmul.gemv_quantized``: it was not for 6144 rows, nor if
    warps share a row."""
    every, length = form.words.shape
    many = (every // 2 if gated else every) >= _FEWEST
    return form.kind == NIBBLES and many and _FOURS // 2 < length // 8 <= _FOURS


def rows_in_turn(
    x: Tensor, form: Form, bias: Tensor | None, gated: bool, width: int, before: Before | None = None
) -> tuple[Tensor, Tensor]:
    """As ``kernels.devices.cuda.matmul.gemv_quantized.multiply``."""
    every, length = form.words.shape
    outputs = every // 2 if gated else every
    scales = form.scales
    out, summed = x.new_empty((1, outputs)), x if before is None else torch.empty_like(x)
    pdl = overlapping(x.device)
    programs = min(triton.cdiv(outputs, _ROWS), _PROGRAMS * multiprocessors(x.device))
    _standing[(programs,)](
        x,
        x if before is None else before.residual,
        summed,
        x if before is None else before.gain,
        form.words.view(torch.int32),
        scales,
        scales if form.zeros is None else form.zeros,
        scales if bias is None else bias,
        out,
        0.0 if before is None else before.eps,
        outputs,
        every,
        length // 2,
        _ROWS,
        _WARPS,
        _FOURS,
        width,
        form.zeros is not None,
        form.brain,
        bias is not None,
        gated,
        before is not None,
        pdl,
        num_warps=_WARPS,
        launch_pdl=pdl,
    )
    return out, summed
