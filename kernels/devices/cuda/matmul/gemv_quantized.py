"""Product of one token and a weight of 8 or 4 bits, with few instructions a number, fused with the norm before it.

Such a product reaches the memory's bandwidth only without waits and with few instructions for many numbers. The weight,
its scales and the norm's gain are requested before the previous kernel has ended. A program prepares the token once for
all of its rows. Integer weights are multiplied as integers, by a token of 16-bit integers with a scale for each 16 or
32 numbers, which is as precise as bfloat16. Weights in e4m3 become float16, and so does the token
(``kernels.devices.cuda.matmul.packed_arithmetic``).

The norm is ``gain * s * rsqrt(mean(s^2) + eps)`` of the token's sum with the residual. As a product is linear, the
weight is multiplied by ``gain * s``, and the result by the reciprocal root, which is known once the whole token is
read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.devices.cuda.elementwise.norm_rope_cache import RopeCacheEpilogue
from kernels.devices.cuda.elementwise.norms import Before
from kernels.devices.cuda.launch import overlapping
from kernels.devices.cuda.matmul.gemm_small_quantized import Form
from kernels.devices.cuda.matmul.norm_then_linear import Fused
from kernels.devices.cuda.matmul.number_conversions import NIBBLES, PIECES
from kernels.devices.cuda.matmul.packed_arithmetic import (
    alternate,
    apart,
    by_bytes,
    by_eighths,
    by_nibbles,
    half,
    inverse,
    joined,
    largest,
    whole,
)
from kernels.devices.cuda.matmul.rope_cache_epilogue import load_rope_epilogue, store_rope_epilogue

__all__ = ["GemvTiling", "fused", "multiply", "tilings", "ways"]

_LONG: Final = 8192  # inputs from which a program has more rows


@dataclass(frozen=True)
class GemvTiling:
    """A program has ``rows`` outputs and ``warps`` warps, of which ``across`` share a row. It reads ``fours`` times 16
    bytes of a row at a time. ``registers``: limit of a thread, so that enough programs run at once.
    """

    rows: int
    warps: int
    across: int
    fours: int
    registers: int | None = None


@gluon.jit
def _numbers(first, mask):
    return gl.load(first, mask=mask, other=0, eviction_policy="evict_first")


@gluon.jit
def _slots(slots, row, outputs, every, tile, tall: gl.constexpr, sums: gl.constexpr):
    """The scales of each row and four words from their tile, for all rows of a thread at once."""
    at = slots + tile[None, :] * every + row[:, None]
    return gl.convert_layout(gl.load(at, mask=(row < outputs)[:, None], other=0), sums)


@gluon.jit
def _read(x, residual, summed, at, inside, writes, normed: gl.constexpr):
    value = gl.load(x + at, mask=inside, other=0.0)
    if normed:
        more = gl.load(residual + at, mask=inside, other=0.0)
        value = (value.to(gl.float32) + more.to(gl.float32)).to(value.dtype)
        gl.store(summed + at, value, mask=inside & writes)
    return value.to(gl.float32)


@gluon.jit
def _rows_of(of, rows: gl.constexpr, dim: gl.constexpr):
    """The program's rows. With heads of ``dim`` the second half of them rotates against the first."""
    if dim == 0:
        return gl.program_id(0) * rows + of
    half: gl.constexpr = dim // 2
    pair = gl.program_id(0) * (rows // 2) + of % (rows // 2)
    return pair // half * dim + pair % half + of // (rows // 2) * half


@gluon.jit
def gemv_quantized_kernel(
    x,
    residual,
    summed,
    gain,
    words,
    scales,
    zeros,
    bias,
    cos,
    sin,
    cache,
    index,
    out,
    eps,
    outputs,
    every,
    heads,
    kv_heads,
    dim: gl.constexpr,
    page_size: gl.constexpr,
    length: gl.constexpr,
    rows: gl.constexpr,
    warps: gl.constexpr,
    across: gl.constexpr,
    fours: gl.constexpr,
    kind: gl.constexpr,
    width: gl.constexpr,
    zeroed: gl.constexpr,
    brain: gl.constexpr,
    biased: gl.constexpr,
    gated: gl.constexpr,
    normed: gl.constexpr,
    pdl: gl.constexpr,
):
    """``length``: words of 32 bits of a row. ``width``: of a tile of ``packing``, words of 16 bits. ``every``: rows of
    the weight, twice the ``outputs`` if ``gated``: silu of the first half is multiplied by the second half. ``dim``:
    head dimension, if the outputs are heads to rotate and store as in ``kernels.devices.cuda.matmul.qkv_projection``;
    otherwise 0.
    """
    like: gl.constexpr = out.dtype.element_ty
    held: gl.constexpr = gl.BlockedLayout(
        [rows * across // warps, 1, 4], [1, 32, 1], [warps // across, across, 1], [2, 1, 0]
    )
    tall: gl.constexpr = gl.BlockedLayout([rows * across // warps, 1], [1, 32], [warps // across, across], [0, 1])
    sums: gl.constexpr = gl.SliceLayout(2, held)
    beside: gl.constexpr = gl.SliceLayout(0, sums)
    flat: gl.constexpr = gl.SliceLayout(0, held)
    # Values of the token that share a scale are in several pieces; each thread has part of each piece.
    pieces: gl.constexpr = 4 if kind == 1 else 1
    piece: gl.constexpr = 8 if kind == 1 else 16
    many: gl.constexpr = max(2, min(piece, fours * piece // (32 * warps)))
    token: gl.constexpr = gl.BlockedLayout(
        [1, pieces, many], [32 * many // piece, 1, piece // many], [warps, 1, 1], [2, 1, 0]
    )
    lead: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, token))
    chunks: gl.constexpr = length // 4
    turns: gl.constexpr = (chunks + fours - 1) // fours
    tile: gl.constexpr = width // 8 if kind == 1 else 1  # fours of words that share their slots
    stride: gl.constexpr = fours * pieces * piece  # of the token, a turn
    max_value: gl.constexpr = 1.0 if kind == 4 else 32767.0

    row = _rows_of(gl.arange(0, rows, layout=gl.SliceLayout(1, sums)), rows, dim)
    near = gl.minimum(row, outputs - 1)
    high_row = _rows_of(gl.arange(0, rows, layout=gl.SliceLayout(1, tall)), rows, dim)
    high_tile = gl.arange(0, fours, layout=gl.SliceLayout(0, tall)) // tile
    place = gl.expand_dims(gl.arange(0, fours, layout=gl.SliceLayout(1, flat)), 1) * 4
    place = gl.expand_dims(place + gl.arange(0, 4, layout=gl.SliceLayout(0, flat))[None, :], 0)
    first = words + gl.expand_dims(gl.expand_dims(near, 1), 2).to(gl.int64) * length + place
    second = first + outputs.to(gl.int64) * length
    chunk = gl.arange(0, fours, layout=lead)
    start = chunk // tile * (4 * width) + chunk % tile * 8 if kind == 1 else chunk * 16
    at = start[:, None] + gl.arange(0, pieces, layout=gl.SliceLayout(0, gl.SliceLayout(2, token)))[None, :] * width
    number = gl.arange(0, piece, layout=gl.SliceLayout(0, gl.SliceLayout(1, token)))
    at = gl.expand_dims(at, 2) + gl.expand_dims(gl.expand_dims(number, 0), 1)
    inside = gl.expand_dims(gl.expand_dims(chunk, 1), 2)
    writes = gl.program_id(0) == 0

    if pdl:
        gdc_launch_dependents()
    word = _numbers(first, place < length)
    other = word
    if gated:
        other = _numbers(second, place < length)
    if turns > 1:
        next_word = _numbers(first + fours * 4, place + fours * 4 < length)
        if gated:
            next_other = _numbers(second + fours * 4, place + fours * 4 < length)
    if kind == 1:
        end: gl.constexpr = (chunks - 1) // tile
        slot = gl.minimum(high_tile, end)
        pair = _slots(scales, high_row, outputs, every, slot, tall, sums)
        zero = _slots(zeros, high_row, outputs, every, slot, tall, sums) if zeroed else pair
        if gated:
            other_pair = _slots(scales + outputs, high_row, outputs, every, slot, tall, sums)
            other_zero = _slots(zeros + outputs, high_row, outputs, every, slot, tall, sums) if zeroed else other_pair
    else:
        scale_of = gl.load(scales + near)
        if gated:
            other_scale = gl.load(scales + outputs + near)
    if biased:
        added = gl.load(bias + near).to(gl.float32)
        if gated:
            other_added = gl.load(bias + outputs + near).to(gl.float32)
    if normed:
        gamma = gl.load(gain + at, mask=inside < chunks, other=0.0)
    if pdl:
        gdc_wait()

    if dim > 0:
        turning = load_rope_epilogue(row, cos, sin, index, dim, rows, warps)
    total = gl.zeros([rows, fours], gl.float32, sums)
    other_total = gl.zeros([rows, fours], gl.float32, sums)
    squares = gl.zeros([fours], gl.float32, lead)
    # Load the token's part of the next turn in this one; with 8 bits, reading the weight takes longer.
    early: gl.constexpr = turns > 1 and kind == 1 and not normed
    if early:
        next_value = gl.load(x + at, mask=inside < chunks, other=0.0)
    for turn in gl.static_range(turns):
        if early:
            value = next_value.to(gl.float32)
            if turn + 1 < turns:
                there = inside + (turn + 1) * fours < chunks
                next_value = gl.load(x + at + (turn + 1) * stride, mask=there, other=0.0)
        else:
            value = _read(x, residual, summed, at + turn * stride, inside + turn * fours < chunks, writes, normed)
        if normed:
            squares += gl.sum(gl.sum(value * value, 2), 1)
            value *= gamma.to(gl.float32)
            if turn + 1 < turns:
                ahead = inside + (turn + 1) * fours < chunks
                gamma = gl.load(gain + at + (turn + 1) * stride, mask=ahead, other=0.0)
        inverse_scale, scale = inverse(gl.max(largest(value, 2), 1), max_value)
        value *= gl.expand_dims(gl.expand_dims(inverse_scale, 1), 2)
        scale = gl.convert_layout(scale, beside)[None, :]
        if kind == 1:
            if turn > 0:
                slot = gl.minimum(high_tile + turn * fours // tile, end)
                pair = _slots(scales, high_row, outputs, every, slot, tall, sums)
                zero = _slots(zeros, high_row, outputs, every, slot, tall, sums) if zeroed else pair
                if gated:
                    other_pair = _slots(scales + outputs, high_row, outputs, every, slot, tall, sums)
                    other_zero = (
                        _slots(zeros + outputs, high_row, outputs, every, slot, tall, sums) if zeroed else other_pair
                    )
            numbers = whole(value)
            front, back = gl.split(gl.sum(gl.sum(numbers - 0x4B400000, 2).reshape(fours, 2, 2), 2))
            front = gl.convert_layout(front, beside)[None, :]
            back = gl.convert_layout(back, beside)[None, :]
            one, two = gl.split(numbers.reshape(fours, 2, 2, 8).permute(0, 1, 3, 2))
            lower, upper = gl.split(joined(one, two).permute(0, 2, 1))
            a, b = apart(lower, fours, flat, beside)
            c, d = apart(upper, fours, flat, beside)
            total += by_nibbles(word, a, b, c, d, front, back, pair, zero, zeroed, brain, sums) * scale
            if gated:
                result = by_nibbles(other, a, b, c, d, front, back, other_pair, other_zero, zeroed, brain, sums)
                other_total += result * scale
        else:
            numbers = whole(value) if kind == 3 else half(value)
            one, two = gl.split(numbers.reshape(fours, 8, 2))
            a, b = alternate(joined(one, two), fours, flat)
            if kind == 3:
                total += by_bytes(word, a, b, True).to(gl.float32) * scale
                if gated:
                    other_total += by_bytes(other, a, b, True).to(gl.float32) * scale
            else:
                total += by_eighths(word, a, b) * scale
                if gated:
                    other_total += by_eighths(other, a, b) * scale
        if turn + 1 < turns:
            word = next_word
            if gated:
                other = next_other
        if turn + 2 < turns:
            ahead_of = place + (turn + 2) * fours * 4 < length
            next_word = _numbers(first + (turn + 2) * fours * 4, ahead_of)
            if gated:
                next_other = _numbers(second + (turn + 2) * fours * 4, ahead_of)
    result = gl.sum(total, 1)
    up = gl.sum(other_total, 1)
    if normed:
        norm = gl.rsqrt(gl.sum(squares, 0) / (chunks * pieces * piece) + eps)
        result *= norm
        up *= norm
    if kind != 1:
        result *= scale_of
        if gated:
            up *= other_scale
    if biased:
        result += added
        if gated:
            up += other_added
    if gated:
        # Rounded as the product is where the activation is an operator of its own.
        gate = result.to(like).to(gl.float32)
        result = gate / (1.0 + gl.exp(-gate)) * up.to(like).to(gl.float32)
    if dim > 0:
        store_rope_epilogue(result.to(like), turning, out, cache, heads, kv_heads, dim, page_size, rows, warps)
    else:
        gl.store(out + row, result.to(like), mask=row < outputs)


def tilings(form: Form, gated: bool) -> dict[str, GemvTiling]:
    """Tilings of a product, by name. If each warp has separate rows, threads sum less between them; if several share
    rows, each thread holds less of the token.
    """
    nibbles, chunks = form.kind == NIBBLES, form.words.shape[1] // 8
    warps = 1 << (max(1, min(2 if nibbles else 4, chunks // 32)).bit_length() - 1)
    rows = (4 if gated else 8) if nibbles else 8 if chunks * 8 * PIECES[form.kind] >= _LONG else 4
    result = {"single": GemvTiling(rows, warps, warps, 32 * warps)}
    if nibbles:
        if chunks <= 128:
            result["rows of a warp"] = GemvTiling(8 if gated else 16, 4, 1, 128, 168)
        else:
            result["warps of a row"] = GemvTiling(8 if gated else 16, 4, 4, 128)
    else:
        result["warps of a row"] = GemvTiling(4 if gated else 8, 4, 4, 128)
        result["rows of a warp"] = GemvTiling(8, 4, 1, 64)
    return result


def multiply(
    x: Tensor,
    form: Form,
    bias: Tensor | None,
    gated: bool,
    width: int,
    tiling: GemvTiling,
    before: Before | None = None,
    epilogue: RopeCacheEpilogue | None = None,
) -> tuple[Tensor, Tensor]:
    """``x`` [1, inputs], dense -> [1, outputs], or half as many, and its sum with the residual that is ``before`` it;
    else ``x``. ``width``: words of a tile of ``packing``. ``epilogue``: placement of heads, if the outputs are heads
    that fit the ``tiling``; then the queries are returned.
    """
    every, length = form.words.shape
    outputs = every // 2 if gated else every
    scales = form.scales
    out = x.new_empty((1, outputs)) if epilogue is None else epilogue.queries(x)
    summed = x if before is None else torch.empty_like(x)
    pdl = overlapping(x.device)
    gemv_quantized_kernel[(triton.cdiv(outputs, tiling.rows),)](
        x,
        x if before is None else before.residual,
        summed,
        x if before is None else before.gain,
        form.words.view(torch.int32),
        scales,
        scales if form.zeros is None else form.zeros,
        scales if bias is None else bias,
        x if epilogue is None else epilogue.cos,
        x if epilogue is None else epilogue.sin,
        x if epilogue is None else epilogue.cache,
        x if epilogue is None else epilogue.index,
        out,
        0.0 if before is None else before.eps,
        outputs,
        every,
        0 if epilogue is None else epilogue.heads,
        0 if epilogue is None else epilogue.cache.shape[2],
        0 if epilogue is None else epilogue.cache.shape[4],
        0 if epilogue is None else epilogue.cache.shape[3],
        length // 2,
        tiling.rows,
        tiling.warps,
        tiling.across,
        tiling.fours,
        form.kind,
        width,
        form.zeros is not None,
        form.brain,
        bias is not None,
        gated,
        before is not None,
        pdl,
        num_warps=tiling.warps,
        maxnreg=tiling.registers,
        launch_pdl=pdl,
    )
    return out, summed


def ways(x: Tensor, form: Form, bias: Tensor | None, gated: bool, width: int) -> dict[str, Callable[[], Tensor]]:
    """Implementations by name: each of the ``tilings``."""
    return {
        name: partial(lambda tiling: multiply(x, form, bias, gated, width, tiling)[0], tiling)
        for name, tiling in tilings(form, gated).items()
    }


def fused(x: Tensor, form: Form, bias: Tensor | None, gated: bool, width: int, before: Before) -> dict[str, Fused]:
    """``ways`` with the norm ``before``, except the first tiling, which prepares the token for too few rows."""
    some = list(tilings(form, gated).items())[1:]
    return {name: partial(multiply, x, form, bias, gated, width, tiling, before) for name, tiling in some}
