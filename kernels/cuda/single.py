"""One token by a weight of 8 or 4 bits, with as few instructions a number as there may be.

Such a product is as fast as the weight is read only where a few instructions make do with many of its numbers. A thread
takes 16 bytes of some rows, all of them at once and before the kernel in front has ended. Whole numbers are multiplied
as they are, by whole numbers of 16 bits that the thread makes of its part of the token, with a scale of their own, so
that they are as close to it as bfloat16 is: two such products are one instruction (PTX, "dp2a"). Their sums become
floating point once for all of a thread's numbers that share their scales. Numbers of e4m3 become float16 two at a time.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.cuda.launch import overlapping
from kernels.cuda.numbers import NIBBLES, PIECES
from kernels.cuda.skinny import Form

__all__ = ["multiply"]

_LONG: Final = 8192  # inputs from which a program has more rows


@gluon.jit
def _rounded(value, inverse):
    """The nearest whole number as the lower half of a word; the sum is exact, and its last bits are the number."""
    return (value * inverse + 12582912.0).to(gl.int32, bitcast=True)


@gluon.jit
def _pairs(low, high):
    """Two numbers of 16 bits in a word, from the lower halves."""
    return (low & 0xFFFF) | (high << 16)


@gluon.jit
def _quarters(eight, threads: gl.constexpr, layout: gl.constexpr):
    """[threads, 8] -> those at even and at odd places, [1, threads, 4], as the words of a row lie."""
    low, high = gl.split(eight.reshape(threads, 4, 2))
    flat: gl.constexpr = gl.SliceLayout(0, layout)
    return gl.convert_layout(low, flat)[None, :, :], gl.convert_layout(high, flat)[None, :, :]


@gluon.jit
def _lower(numbers, bytes_, total, signed: gl.constexpr):
    """total + the two numbers by the lower two bytes."""
    code: gl.constexpr = "dp2a.lo.s32.s32 $0, $1, $2, $3;" if signed else "dp2a.lo.s32.u32 $0, $1, $2, $3;"
    return gl.inline_asm_elementwise(code, "=r,r,r,r", [numbers, bytes_, total], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _upper(numbers, bytes_, total, signed: gl.constexpr):
    code: gl.constexpr = "dp2a.hi.s32.s32 $0, $1, $2, $3;" if signed else "dp2a.hi.s32.u32 $0, $1, $2, $3;"
    return gl.inline_asm_elementwise(code, "=r,r,r,r", [numbers, bytes_, total], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _bytes(word, low, high):
    """Sums of 16 numbers of int8 for each row and thread."""
    zero = gl.zeros_like(word)
    return gl.sum(_upper(high, word, _lower(low, word, zero, True), True), 2)


@gluon.jit
def _nibbles(word, low, high):
    """Sums of 16 numbers, those of the lower halves of bytes."""
    zero = gl.zeros_like(word)
    word = word & 0x0F0F0F0F
    return gl.sum(_upper(high, word, _lower(low, word, zero, False), False), 2)


@gluon.jit
def _eighths(word, first, second, third, fourth):
    """Sums of 16 numbers of e4m3 for each row and thread; by those of the token at each place of a word's four."""
    code: gl.constexpr = """{
        .reg .b16 l, h, a, b, c, d; .reg .b32 u, v; .reg .f32 p, t;
        mov.b32 {l, h}, $1;
        cvt.rn.f16x2.e4m3x2 u, l; cvt.rn.f16x2.e4m3x2 v, h; mov.b32 {a, b}, u; mov.b32 {c, d}, v;
        cvt.f32.f16 p, a; mul.rn.f32 t, p, $2; cvt.f32.f16 p, b; fma.rn.f32 t, p, $3, t;
        cvt.f32.f16 p, c; fma.rn.f32 t, p, $4, t; cvt.f32.f16 p, d; fma.rn.f32 $0, p, $5, t; }"""
    found = gl.inline_asm_elementwise(
        code, "=f,r,f,f,f,f", [word, first, second, third, fourth], dtype=gl.float32, is_pure=True, pack=1
    )
    return gl.sum(found, 2)


@gluon.jit
def _largest(value):
    """Bits of the largest of a thread's numbers; a NaN is larger than infinity."""
    return gl.max(value.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@gluon.jit
def _inverse(bits):
    """What makes the largest 32767, and what undoes it."""
    most = gl.maximum(bits, 0x0D800000).to(gl.float32, bitcast=True)
    return 32767.0 / most, most * (1.0 / 32767.0)


@gluon.jit
def _single(
    x,
    words,
    scales,
    zeros,
    bias,
    out,
    outputs,
    length: gl.constexpr,
    rows: gl.constexpr,
    warps: gl.constexpr,
    kind: gl.constexpr,
    width: gl.constexpr,
    zeroed: gl.constexpr,
    brain: gl.constexpr,
    biased: gl.constexpr,
    gated: gl.constexpr,
    pdl: gl.constexpr,
):
    """``rows`` outputs a program; ``length``: words of 32 bits of a row. ``width``: of a tile of ``packing``, words of
    16 bits. ``gated``: and what silu of them is multiplied by, ``outputs`` rows further down.
    """
    like: gl.constexpr = out.dtype.element_ty
    threads: gl.constexpr = 32 * warps
    held: gl.constexpr = gl.BlockedLayout([rows, 1, 4], [1, 32, 1], [1, warps, 1], [2, 1, 0])
    sums: gl.constexpr = gl.SliceLayout(2, held)
    across: gl.constexpr = gl.SliceLayout(1, sums)
    eight: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [warps, 1], [1, 0])
    sixteen: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [warps, 1], [1, 0])
    chunks: gl.constexpr = length // 4
    tile: gl.constexpr = width // 8  # threads of a tile
    turns: gl.constexpr = (chunks + threads - 1) // threads
    base = gl.program_id(0) * rows
    row = gl.minimum(base + gl.arange(0, rows, layout=across), outputs - 1)
    every = outputs * 2 if gated else outputs
    chunk = gl.arange(0, threads, layout=gl.SliceLayout(0, sums))
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, held)))
    four = gl.expand_dims(gl.expand_dims(four, 0), 0)
    there = gl.expand_dims(gl.expand_dims(chunk, 0), 2) * 4 + four
    first = words + gl.expand_dims(gl.expand_dims(row, 1), 2).to(gl.int64) * length + there
    if pdl:
        gdc_launch_dependents()
    inside = there < length
    w = gl.load(first, mask=inside, other=0, eviction_policy="evict_first")
    u = w
    if gated:
        u = gl.load(first + outputs.to(gl.int64) * length, mask=inside, other=0, eviction_policy="evict_first")
    if pdl:
        gdc_wait()
    total = gl.zeros([rows, threads], gl.float32, sums)
    other = gl.zeros([rows, threads], gl.float32, sums)
    for turn in gl.static_range(turns):
        if turn > 0:
            inside = there + turn * threads * 4 < length
            w = gl.load(first + turn * threads * 4, mask=inside, other=0, eviction_policy="evict_first")
            if gated:
                second = first + outputs.to(gl.int64) * length
                u = gl.load(second + turn * threads * 4, mask=inside, other=0, eviction_policy="evict_first")
        if kind == 1:
            mine = turn * threads + gl.arange(0, threads, layout=gl.SliceLayout(1, eight))
            start = mine // tile * (4 * width) + mine % tile * 8
            at = x + start[:, None] + gl.arange(0, 8, layout=gl.SliceLayout(0, eight))[None, :]
            exists = (mine < chunks)[:, None]
            v0 = gl.load(at, mask=exists, other=0.0).to(gl.float32)
            v1 = gl.load(at + width, mask=exists, other=0.0).to(gl.float32)
            v2 = gl.load(at + 2 * width, mask=exists, other=0.0).to(gl.float32)
            v3 = gl.load(at + 3 * width, mask=exists, other=0.0).to(gl.float32)
            bits = gl.maximum(gl.maximum(_largest(v0), _largest(v1)), gl.maximum(_largest(v2), _largest(v3)))
            inverse, scale = _inverse(bits)
            q0, q1 = _rounded(v0, inverse[:, None]), _rounded(v1, inverse[:, None])
            q2, q3 = _rounded(v2, inverse[:, None]), _rounded(v3, inverse[:, None])
            front = gl.sum((q0 - 0x4B400000) + (q1 - 0x4B400000), 1)
            back = gl.sum((q2 - 0x4B400000) + (q3 - 0x4B400000), 1)
            low, high = _quarters(_pairs(q0, q1), threads, held)
            lower, upper = _quarters(_pairs(q2, q3), threads, held)
            scale = gl.convert_layout(scale, gl.SliceLayout(0, sums))[None, :]
            front = gl.convert_layout(front, gl.SliceLayout(0, sums))[None, :]
            back = gl.convert_layout(back, gl.SliceLayout(0, sums))[None, :]
            which = gl.minimum(chunk + turn * threads, chunks - 1) // tile
            place = which[None, :] * every + row[:, None]
            total += _grouped(w, low, high, lower, upper, front, back, scales, zeros, place, zeroed, brain) * scale
            if gated:
                place += outputs
                other += _grouped(u, low, high, lower, upper, front, back, scales, zeros, place, zeroed, brain) * scale
        else:
            mine = turn * threads + gl.arange(0, threads, layout=gl.SliceLayout(1, sixteen))
            at = x + mine[:, None] * 16 + gl.arange(0, 16, layout=gl.SliceLayout(0, sixteen))[None, :]
            value = gl.load(at, mask=(mine < chunks)[:, None], other=0.0).to(gl.float32)
            if kind == 3:
                inverse, scale = _inverse(_largest(value))
                q0, q1 = gl.split(_rounded(value, inverse[:, None]).reshape(threads, 8, 2))
                low, high = _quarters(_pairs(q0, q1), threads, held)
                scale = gl.convert_layout(scale, gl.SliceLayout(0, sums))[None, :]
                total += _bytes(w, low, high).to(gl.float32) * scale
                if gated:
                    other += _bytes(u, low, high).to(gl.float32) * scale
            else:
                even, odd = gl.split(value.reshape(threads, 8, 2))
                v0, v2 = _quarters(even, threads, held)
                v1, v3 = _quarters(odd, threads, held)
                total += _eighths(w, v0, v1, v2, v3)
                if gated:
                    other += _eighths(u, v0, v1, v2, v3)
    found = gl.sum(total, 1)
    if kind != 1:
        found *= gl.load(scales + row)
    if biased:
        found += gl.load(bias + row).to(gl.float32)
    if gated:
        up = gl.sum(other, 1)
        if kind != 1:
            up *= gl.load(scales + outputs + row)
        if biased:
            up += gl.load(bias + outputs + row).to(gl.float32)
        # Rounded as the product is where the activation is an operator of its own.
        gate = found.to(like).to(gl.float32)
        found = gate / (1.0 + gl.exp(-gate)) * up.to(like).to(gl.float32)
    gl.store(out + row, found.to(like))


@gluon.jit
def _grouped(
    word, low, high, lower, upper, front, back, scales, zeros, place, zeroed: gl.constexpr, brain: gl.constexpr
):
    """Sums of 32 numbers, each half of which has its scale. ``front``, ``back``: sums of what halves are taken by."""
    pair = gl.load(scales + place)
    if brain:
        first = (pair << 16).to(gl.float32, bitcast=True)
        second = (pair & -65536).to(gl.float32, bitcast=True)
    else:
        first = pair.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        second = (pair >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    if zeroed:
        zero = gl.load(zeros + place)
        less, least = front * (zero & 255), back * ((zero >> 8) & 255)
    else:
        less, least = front * 8, back * 8
    here = _nibbles(word, low, high) - less
    there = _nibbles(word >> 4, lower, upper) - least
    return here.to(gl.float32) * first + there.to(gl.float32) * second


def multiply(x: Tensor, form: Form, bias: Tensor | None, gated: bool, width: int) -> Tensor:
    """``x`` [1, inputs], dense -> [1, outputs], or half as many. ``width``: words of a tile of ``packing``."""
    outputs, length = form.words.shape
    outputs = outputs // 2 if gated else outputs
    nibbles = form.kind == NIBBLES
    rows = 8 if nibbles or length * PIECES[form.kind] >= _LONG else 4
    warps = 1 << (max(1, min(2 if nibbles else 4, length // 256)).bit_length() - 1)
    scales = form.scales
    assert scales is not None
    out = x.new_empty((1, outputs))
    pdl = overlapping(x.device)
    _single[(triton.cdiv(outputs, rows),)](
        x,
        form.words.view(torch.int32),
        scales,
        scales if form.zeros is None else form.zeros,
        scales if bias is None else bias,
        out,
        outputs,
        length // 2,
        rows,
        warps,
        form.kind,
        width,
        form.zeros is not None,
        form.brain,
        bias is not None,
        gated,
        pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return out
