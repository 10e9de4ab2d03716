"""Products of several small numbers packed into 32-bit words, for ``kernels.devices.cuda.matmul.gemv_quantized``.

Integers are multiplied by 16-bit integers (PTX ``dp2a``), e4m3 by float16, two numbers a word.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = [
    "alternate",
    "apart",
    "by_bytes",
    "by_e2m1",
    "by_eighths",
    "by_nibbles",
    "half",
    "halves",
    "inverse",
    "joined",
    "largest",
    "quarters",
    "whole",
]


@gluon.jit
def lower(numbers, bytes_, total, signed: gl.constexpr):
    """total + the products of two 16-bit values with the lower two bytes."""
    code: gl.constexpr = "dp2a.lo.s32.s32 $0, $1, $2, $3;" if signed else "dp2a.lo.s32.u32 $0, $1, $2, $3;"
    return gl.inline_asm_elementwise(code, "=r,r,r,r", [numbers, bytes_, total], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def upper(numbers, bytes_, total, signed: gl.constexpr):
    """The same with the upper two bytes."""
    code: gl.constexpr = "dp2a.hi.s32.s32 $0, $1, $2, $3;" if signed else "dp2a.hi.s32.u32 $0, $1, $2, $3;"
    return gl.inline_asm_elementwise(code, "=r,r,r,r", [numbers, bytes_, total], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def eighths(word, low, high):
    """Products of four e4m3 with four float16 values -> two sums of two products each, in float16."""
    code: gl.constexpr = """{
        .reg .b16 l, h; .reg .b32 u, v; mov.b32 {l, h}, $1;
        cvt.rn.f16x2.e4m3x2 u, l; cvt.rn.f16x2.e4m3x2 v, h; mul.rn.f16x2 u, u, $2; fma.rn.f16x2 $0, v, $3, u; }"""
    return gl.inline_asm_elementwise(code, "=r,r,r,r", [word, low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def add_halves(one, other):
    """Add two pairs of float16 values."""
    code: gl.constexpr = "add.rn.f16x2 $0, $1, $2;"
    return gl.inline_asm_elementwise(code, "=r,r,r", [one, other], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def sum_halves(word):
    """The sum of a word's two float16 values, in float32."""
    code: gl.constexpr = """{
        .reg .b16 l, h; .reg .f32 a, b; mov.b32 {l, h}, $1; cvt.f32.f16 a, l; cvt.f32.f16 b, h; add.f32 $0, a, b; }"""
    return gl.inline_asm_elementwise(code, "=f,r", [word], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def micros(word, one, two, three, four):
    """Products of eight e2m1 with eight float16 values, of which each word has those at i and i + 4 -> two sums of four
    products each, 2^14 times too small, in float16."""
    code: gl.constexpr = """{
        .reg .b32 m, s, t;
        shl.b32 m, $1, 9; and.b32 m, m, 0x0e000e00; shl.b32 s, $1, 12; lop3.b32 m, s, 0x80008000, m, 0xea;
        mul.rn.f16x2 t, m, $2;
        shl.b32 m, $1, 5; and.b32 m, m, 0x0e000e00; shl.b32 s, $1, 8; lop3.b32 m, s, 0x80008000, m, 0xea;
        fma.rn.f16x2 t, m, $3, t;
        shl.b32 m, $1, 1; and.b32 m, m, 0x0e000e00; shl.b32 s, $1, 4; lop3.b32 m, s, 0x80008000, m, 0xea;
        fma.rn.f16x2 t, m, $4, t;
        shr.b32 m, $1, 3; and.b32 m, m, 0x0e000e00; lop3.b32 m, $1, 0x80008000, m, 0xea;
        fma.rn.f16x2 $0, m, $5, t; }"""
    return gl.inline_asm_elementwise(
        code, "=r,r,r,r,r,r", [word, one, two, three, four], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def by_e2m1(word, one, two, three, four):
    """Sums of the 32 products of each four words."""
    return sum_halves(gl.reduce(micros(word, one, two, three, four), 2, add_halves))


@gluon.jit
def by_bytes(word, low, high, signed: gl.constexpr):
    """Sums of the 16 products of each four words."""
    return gl.sum(upper(high, word, lower(low, word, gl.zeros_like(word), signed), signed), 2)


@gluon.jit
def by_eighths(word, low, high):
    """The same of e4m3."""
    return sum_halves(gl.reduce(eighths(word, low, high), 2, add_halves))


@gluon.jit
def quarters(words, sums: gl.constexpr):
    """The four words of the last two axes, each of layout ``sums``."""
    first, second = gl.split(words)
    one, three = gl.split(first)
    two, four = gl.split(second)
    one, two = gl.convert_layout(one, sums), gl.convert_layout(two, sums)
    return one, two, gl.convert_layout(three, sums), gl.convert_layout(four, sums)


@gluon.jit
def in_turn(one, two, three, four, low, high, total):
    """``total`` plus the 16 products of each four words, as a chain of multiply-adds without separate additions.
    ``low``, ``high``: results of ``apart``.
    """
    a, b, c, d = low
    e, f, g, h = high
    total = upper(e, one, lower(a, one, total, False), False)
    total = upper(f, two, lower(b, two, total, False), False)
    total = upper(g, three, lower(c, three, total, False), False)
    return upper(h, four, lower(d, four, total, False), False)


@gluon.jit
def by_nibbles(
    word,
    low,
    high,
    upper_low,
    upper_high,
    front,
    back,
    pair,
    zero,
    zeroed: gl.constexpr,
    brain: gl.constexpr,
    sums: gl.constexpr,
):
    """Sums of the 32 products of each four words, each half of which has its scale, two in a ``pair``.

    ``front``, ``back``: sums of the token's values for the halves; ``zero``: two bytes, the zero points of the halves.
    A nibble in the upper half of its byte counts 16 times: shifting it would take another instruction.
    """
    one, two, three, four = quarters(word.reshape(word.shape[0], word.shape[1], 2, 2), sums)
    if zeroed:
        less, least = front * -(zero & 255), back * -((zero >> 4) & 0xFF0)
    else:
        less, least = gl.zeros_like(pair) + front * -8, gl.zeros_like(pair) + back * -128
    m: gl.constexpr = 0x0F0F0F0F
    here = in_turn(one & m, two & m, three & m, four & m, low, high, less)
    n: gl.constexpr = -0x0F0F0F10
    there = in_turn(one & n, two & n, three & n, four & n, upper_low, upper_high, least)
    if brain:
        first = (pair << 16).to(gl.float32, bitcast=True)
        second = (pair & -65536).to(gl.float32, bitcast=True)
    else:
        first = pair.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        second = (pair >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    return here.to(gl.float32) * first + there.to(gl.float32) * (second * 0.0625)


@gluon.jit
def largest(value, axis: gl.constexpr):
    """Bits of the maximum of positive values; NaN is larger than infinity."""
    return gl.max(value.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis)


@gluon.jit
def inverse(bits, max_value: gl.constexpr):
    """The factor that maps the maximum to ``max_value``, and its inverse."""
    result = gl.maximum(bits, 0x0D800000).to(gl.float32, bitcast=True)
    return max_value / result, result * (1.0 / max_value)


@gluon.jit
def whole(value):
    """The nearest integer as the lower half of a word; the sum is exact, and its last bits are the integer."""
    return (value + 12582912.0).to(gl.int32, bitcast=True)


@gluon.jit
def half(value):
    """The value as float16 in the lower half of a word."""
    return value.to(gl.float16).to(gl.int16, bitcast=True).to(gl.int32)


@gluon.jit
def halves(first, second):
    """Two values as float16, in one word."""
    code: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(code, "=r,r,r", [first, second], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def joined(first, second):
    """A word of the lower halves."""
    return (first & 0xFFFF) | (second << 16)


@gluon.jit
def alternate(pairs, fours: gl.constexpr, flat: gl.constexpr):
    """[fours, 8] -> those at even and at odd places, [1, fours, 4], as the words of a row lie."""
    even, odd = gl.split(pairs.reshape(fours, 4, 2))
    return gl.convert_layout(even, flat)[None, :, :], gl.convert_layout(odd, flat)[None, :, :]


@gluon.jit
def apart(pairs, fours: gl.constexpr, flat: gl.constexpr, beside: gl.constexpr):
    """The same as four of [1, fours] each."""
    even, odd = gl.split(pairs.reshape(fours, 4, 2))
    a, b, c, d = quarters(gl.convert_layout(even, flat).reshape(fours, 2, 2), beside)
    e, f, g, h = quarters(gl.convert_layout(odd, flat).reshape(fours, 2, 2), beside)
    low = (a[None, :], b[None, :], c[None, :], d[None, :])
    return low, (e[None, :], f[None, :], g[None, :], h[None, :])
