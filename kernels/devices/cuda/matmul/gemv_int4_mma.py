"""Product of one token and a 4-bit weight with many rows, on the matrix unit: a third of the instructions of
``gemv_int4_persistent``.

A program has 16 rows at a time. They are the left side of the unit's products (m16n8k32, PTX ISA, "Matrix fragments for
mma.m16n8k32"), half of each byte at a time. The token is the right side: 16-bit integers in two alternating columns,
lower bytes and upper bytes, so each thread has the sums of its two rows. Values of a group share one scale, and so do
the values of the token that they are multiplied by. Only as many programs run as fit on the device; each prepares the
token once and processes one block of rows after another.
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
from kernels.devices.cuda.matmul.packed_arithmetic import whole

__all__ = ["rows_in_turn", "suits"]

_WIDTH: Final = (
    64  # words of 16 bits of a tile of ``kernels.devices.cuda.matmul.packing``: groups are 128 numbers or more
)
_TILES: Final = 16  # of a row, at most
_WARPS: Final = 8
_REGISTERS: Final = 128  # of a thread, so that as many programs run at once
_PROGRAMS: Final = 2  # of a multiprocessor
_FEWEST: Final = 8192  # outputs


@gluon.jit
def in_bytes(a, b, c, d):
    """Four 16-bit integers -> a word of their lower bytes and one of their upper bytes."""
    code: gl.constexpr = """{
        .reg .b32 p, q, r, s, x, y, u, v;
        add.s32 p, $2, 128; add.s32 q, $3, 128; add.s32 r, $4, 128; add.s32 s, $5, 128;
        prmt.b32 x, $2, $3, 0x0040; prmt.b32 y, $4, $5, 0x0040;
        prmt.b32 u, p, q, 0x0051; prmt.b32 v, r, s, 0x0051;
        prmt.b32 $0, x, y, 0x5410; prmt.b32 $1, u, v, 0x5410; }"""
    return gl.inline_asm_elementwise(
        code, "=&r,=&r,r,r,r,r", [a, b, c, d], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def sums_of(one, two, token, upper: gl.constexpr):
    """Sums of products of half the values of eight words of two rows with those of ``token``; the upper half of a byte
    counts 16 times."""
    head: gl.constexpr = "{ .reg .b32 a, b, c, d, e, f, g, h, z, m; mov.b32 z, 0; mov.b32 m, "
    mask: gl.constexpr = "0xF0F0F0F0" if upper else "0x0F0F0F0F"
    rest: gl.constexpr = """;
        and.b32 a, $2, m; and.b32 b, $10, m; and.b32 c, $3, m; and.b32 d, $11, m;
        mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {e, f, g, h}, {a, b, c, d}, {$18, $19}, {z, z, z, z};
        and.b32 a, $4, m; and.b32 b, $12, m; and.b32 c, $5, m; and.b32 d, $13, m;
        mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {e, f, g, h}, {a, b, c, d}, {$20, $21}, {e, f, g, h};
        and.b32 a, $6, m; and.b32 b, $14, m; and.b32 c, $7, m; and.b32 d, $15, m;
        mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {e, f, g, h}, {a, b, c, d}, {$22, $23}, {e, f, g, h};
        and.b32 a, $8, m; and.b32 b, $16, m; and.b32 c, $9, m; and.b32 d, $17, m;
        mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {e, f, g, h}, {a, b, c, d}, {$24, $25}, {e, f, g, h};
        mad.lo.s32 $0, f, 256, e; mad.lo.s32 $1, h, 256, g; }"""
    code: gl.constexpr = head + mask + rest
    a, b, c, d, e, f, g, h = one
    i, j, k, n, m, o, p, q = two
    r, s, t, u, v, w, x, y = token
    return gl.inline_asm_elementwise(
        code,
        "=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [a, b, c, d, e, f, g, h, i, j, k, n, m, o, p, q, r, s, t, u, v, w, x, y],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def total_of(token):
    """The sum of the token's values that belong to eight words."""
    code: gl.constexpr = """{
        .reg .b32 e, f, g, h, z, m; mov.b32 z, 0; mov.b32 m, 0x01010101;
        mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {e, f, g, h}, {m, m, m, m}, {$1, $2}, {z, z, z, z};
        mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {e, f, g, h}, {m, m, m, m}, {$3, $4}, {e, f, g, h};
        mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {e, f, g, h}, {m, m, m, m}, {$5, $6}, {e, f, g, h};
        mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {e, f, g, h}, {m, m, m, m}, {$7, $8}, {e, f, g, h};
        mad.lo.s32 $0, f, 256, e; }"""
    a, b, c, d, e, f, g, h = token
    return gl.inline_asm_elementwise(
        code, "=&r,r,r,r,r,r,r,r,r", [a, b, c, d, e, f, g, h], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def four(words, like: gl.constexpr):
    """The words of the last axis, each of layout ``like``."""
    words = words.reshape(words.shape[0], words.shape[1], words.shape[2], words.shape[3], 2, 2)
    even, odd = gl.split(words)
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return (
        gl.convert_layout(a, like),
        gl.convert_layout(b, like),
        gl.convert_layout(c, like),
        gl.convert_layout(d, like),
    )


@gluon.jit
def eight(words, like: gl.constexpr):
    """The same of eight."""
    words = words.reshape(words.shape[0], words.shape[1], words.shape[2], words.shape[3], 2, 4)
    first, second = gl.split(words.permute(0, 1, 2, 3, 5, 4))
    return four(first, like) + four(second, like)


@gluon.jit
def _ready(value, doubles: gl.constexpr, sixteens: gl.constexpr, beside: gl.constexpr, sums: gl.constexpr):
    """``value`` [tiles, 8, 2, 2, 8]: chunks of 16 bytes of a tile, halves of bytes, pieces and values -> the words of
    both halves, their sums, and the inverse scales."""
    tiles: gl.constexpr = value.shape[0]
    bits = value.to(gl.int32, bitcast=True) & 0x7FFFFFFF  # compared as integers, NaN is larger than infinity
    most = gl.max(gl.max(gl.max(bits, 4), 3), 1)
    most = gl.maximum(most, 0x0D800000).to(gl.float32, bitcast=True)
    # 127 * 256: after subtracting the signed lower bytes, the upper bytes fit too.
    inverse = gl.expand_dims(gl.expand_dims(gl.expand_dims(32512.0 / most, 1), 3), 4)
    numbers = whole(value * inverse)
    low_scale, high_scale = gl.split(gl.convert_layout(most * (1.0 / 32512.0), doubles))
    one, two = gl.split(numbers.permute(0, 1, 2, 4, 3))
    a, c = gl.split(one.reshape(tiles, 8, 2, 4, 2))
    b, d = gl.split(two.reshape(tiles, 8, 2, 4, 2))
    left, right = in_bytes(a, b, c, d)
    both = gl.join(left, right).reshape(tiles, 2, 4, 2, 4, 2).permute(5, 0, 2, 3, 1, 4)
    both = gl.convert_layout(both.reshape(1, 2, tiles, 4, 16), sixteens)
    first, second = gl.split(both.reshape(1, 2, tiles, 4, 2, 8).permute(0, 1, 2, 3, 5, 4))
    low, high = eight(first, sums), eight(second, sums)
    low_scale = gl.expand_dims(gl.expand_dims(gl.convert_layout(low_scale, beside), 0), 0)
    high_scale = gl.expand_dims(gl.expand_dims(gl.convert_layout(high_scale, beside), 0), 0)
    return low, high, total_of(low), total_of(high), low_scale, high_scale


@gluon.jit
def _words(words, scales, zeros, row, tile, place, every, here, length: gl.constexpr, zeroed: gl.constexpr):
    """Eight words of each quarter of a row's tiles, in two halves, and their scales. ``here``: whether the row
    exists."""
    tiles: gl.constexpr = length // 32
    at = gl.expand_dims(gl.expand_dims(gl.expand_dims(row, 2), 3), 4).to(gl.int64) * length + place
    there = here & gl.expand_dims(gl.expand_dims(tile < tiles, 0), 0)
    mask = gl.expand_dims(gl.expand_dims(there, 3), 4)
    one = gl.load(words + at, mask=mask, other=0, eviction_policy="evict_first")
    two = gl.load(words + at + 16, mask=mask, other=0, eviction_policy="evict_first")
    slot = gl.expand_dims(gl.expand_dims(gl.minimum(tile, tiles - 1), 0), 0) * every + gl.expand_dims(row, 2)
    pair = gl.load(scales + slot, mask=there, other=0)
    zero = gl.load(zeros + slot, mask=there, other=0) if zeroed else pair
    return one, two, pair, zero


@gluon.jit
def _scaled(found, pair, zero, total, scale, upper: gl.constexpr, zeroed: gl.constexpr, brain: gl.constexpr):
    """A group's sum, corrected by its zero point and scaled. ``total`` and ``scale``: those of the token."""
    if zeroed:
        found -= total * gl.expand_dims(((zero >> 4) & 0xFF0) if upper else (zero & 255), 3)
    else:
        found -= total * (128 if upper else 8)
    if brain:
        own = ((pair & -65536) if upper else (pair << 16)).to(gl.float32, bitcast=True)
    else:
        own = ((pair >> 16) if upper else pair).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    return found.to(gl.float32) * gl.expand_dims(own * (scale * 0.0625 if upper else scale), 3)


@gluon.jit
def _product(one, two, token, zeroed: gl.constexpr, brain: gl.constexpr, sums: gl.constexpr):
    """The sums of ``_words`` of two rows multiplied by the token of ``_ready``; each quarter has all of them."""
    first, first_half, pair, zero = one
    second, second_half, other_pair, other_zero = two
    low, high, low_total, high_total, low_scale, high_scale = token
    mine = four(first, sums) + four(first_half, sums)
    theirs = four(second, sums) + four(second_half, sums)
    a, b = sums_of(mine, theirs, low, False)
    c, d = sums_of(mine, theirs, high, True)
    found = _scaled(a, pair, zero, low_total, low_scale, False, zeroed, brain)
    found += _scaled(c, pair, zero, high_total, high_scale, True, zeroed, brain)
    further = _scaled(b, other_pair, other_zero, low_total, low_scale, False, zeroed, brain)
    further += _scaled(d, other_pair, other_zero, high_total, high_scale, True, zeroed, brain)
    return found, further


@gluon.jit
def _added(found, further, lines: gl.constexpr):
    """The sums of rows."""
    both = gl.sum(gl.sum(gl.join(found, further), 2), 2) * 0.25
    one, two = gl.split(both)
    return gl.convert_layout(one, lines), gl.convert_layout(two, lines)


@gluon.jit
def _rows(block, line, outputs, gated: gl.constexpr):
    """The rows of a block: eight pairs. Rows after the last are masked."""
    if gated:
        one = gl.minimum(block * 8 + line, outputs - 1)
        two = one + outputs
    else:
        one = gl.minimum(block * 16 + line, outputs - 1)
        two = gl.minimum(block * 16 + line + 8, outputs - 1)
    return one, two


@gluon.jit
def _finish(
    a, b, one, two, out, bias, biased: gl.constexpr, gated: gl.constexpr
):  # fmt: skip
    """Store the sums of rows in ``out``; duplicate rows store the same values."""
    like: gl.constexpr = out.dtype.element_ty
    if biased:
        a += gl.load(bias + one).to(gl.float32)
        b += gl.load(bias + two).to(gl.float32)
    if gated:
        # Rounded as the product is where the activation is an operator of its own.
        gate = a.to(like).to(gl.float32)
        gl.store(out + one, (gate / (1.0 + gl.exp(-gate)) * b.to(like).to(gl.float32)).to(like))
    else:
        gl.store(out + one, a.to(like))
        gl.store(out + two, b.to(like))


@gluon.jit
def _matrix(
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
    blocks,
    length: gl.constexpr,
    warps: gl.constexpr,
    tiles: gl.constexpr,
    zeroed: gl.constexpr,
    brain: gl.constexpr,
    biased: gl.constexpr,
    gated: gl.constexpr,
    normed: gl.constexpr,
    pdl: gl.constexpr,
):
    """As ``kernels.devices.cuda.matmul.gemv_quantized._single``. ``tiles``: no fewer than a row has. ``blocks`` of
    16 rows."""
    # Eight rows, tiles, quarters of their halves, words. A quarter's threads are those of a row of the matrix unit.
    # Each warp prepares its own tiles of the token and waits for no other.
    own: gl.constexpr = tiles // warps
    held: gl.constexpr = gl.BlockedLayout([1, 1, own, 1, 4], [4, 2, 1, 4, 1], [1, 1, warps, 1, 1], [4, 3, 2, 1, 0])
    sixteens: gl.constexpr = gl.BlockedLayout([1, 1, own, 1, 16], [4, 2, 1, 4, 1], [1, 1, warps, 1, 1], [4, 3, 2, 1, 0])
    twos: gl.constexpr = gl.BlockedLayout([1, 1, own, 1, 2], [4, 2, 1, 4, 1], [1, 1, warps, 1, 1], [4, 3, 2, 1, 0])
    doubles: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(3, twos)))
    sums: gl.constexpr = gl.SliceLayout(4, held)
    lines: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, sums))
    beside: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(3, sums)))
    # Tiles, chunks of 16 bytes, halves of bytes, pieces and numbers; see ``kernels.devices.cuda.matmul.packing``.
    token: gl.constexpr = gl.BlockedLayout([1, 1, 1, 2, 8], [own, 8, 2, 1, 1], [warps, 1, 1, 1, 1], [4, 3, 2, 1, 0])
    late: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(4, token))
    early: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, token))
    of_tiles: gl.constexpr = length // 32

    line = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, lines)), 1) * 2
    line = line + gl.expand_dims(gl.arange(0, 2, layout=gl.SliceLayout(0, lines)), 0)
    tile = gl.arange(0, tiles, layout=beside)
    quarter = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, sums))))
    place = gl.expand_dims(gl.expand_dims(gl.expand_dims(tile, 0), 0), 3) * 32
    place = place + gl.expand_dims(gl.expand_dims(gl.expand_dims(quarter, 0), 0), 0) * 4
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, held)))))
    place = gl.expand_dims(place, 4) + gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(word, 0), 0), 0), 0)
    of = gl.arange(0, tiles, layout=gl.SliceLayout(1, gl.SliceLayout(2, late)))
    of = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(of, 1), 2), 3), 4)
    chunk = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, late)))
    at = of * 256 + gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(chunk, 0), 2), 3), 4) * 8
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(0, late)))
    at = at + gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(half, 0), 0), 3), 4) * 128
    piece = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(4, token)))))
    at = at + gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(piece, 0), 0), 0), 4) * 64
    number = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(0, early)))
    at = at + gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(number, 0), 0), 0), 0)

    block, step = gl.program_id(0), gl.num_programs(0)
    one, two = _rows(block, line, outputs, gated)
    if pdl:
        gdc_launch_dependents()
    mine = _words(words, scales, zeros, one, tile, place, every, True, length, zeroed)
    theirs = _words(words, scales, zeros, two, tile, place, every, True, length, zeroed)
    if normed:
        gamma = gl.load(gain + at, mask=of < of_tiles, other=0.0)
    if pdl:
        gdc_wait()

    value = gl.load(x + at, mask=of < of_tiles, other=0.0)
    if normed:
        more = gl.load(residual + at, mask=of < of_tiles, other=0.0)
        value = (value.to(gl.float32) + more.to(gl.float32)).to(value.dtype)
        gl.store(summed + at, value, mask=(of < of_tiles) & (block == 0))
    value = value.to(gl.float32)
    norm = 1.0
    if normed:
        squares = gl.sum(gl.sum(gl.sum(gl.sum(gl.sum(value * value, 4), 3), 2), 1), 0)
        norm = gl.rsqrt(squares / (length * 8) + eps)
        value *= gamma.to(gl.float32)
    ready = _ready(value, doubles, sixteens, beside, sums)
    for begin in range(block, blocks, step):
        found, further = _product(mine, theirs, ready, zeroed, brain, sums)
        one, two = _rows(begin + step, line, outputs, gated)
        mine = _words(words, scales, zeros, one, tile, place, every, begin + step < blocks, length, zeroed)
        theirs = _words(words, scales, zeros, two, tile, place, every, begin + step < blocks, length, zeroed)
        a, b = _added(found, further, lines)
        one, two = _rows(begin, line, outputs, gated)
        _finish(a * norm, b * norm, one, two, out, bias, biased, gated)


def suits(form: Form, gated: bool, width: int) -> bool:
    """Whether it is faster than ``kernels.devices.cuda.matmul.gemv_quantized``: it was not for 6144 or 4096 rows, nor
    for rows of 14336 inputs. ``width``: words of a tile."""
    every, length = form.words.shape
    many = (every // 2 if gated else every) >= _FEWEST
    return form.kind == NIBBLES and width == _WIDTH and many and _TILES // 2 < length // _WIDTH <= _TILES


def rows_in_turn(
    x: Tensor, form: Form, bias: Tensor | None, gated: bool, before: Before | None = None
) -> tuple[Tensor, Tensor]:
    """As ``kernels.devices.cuda.matmul.gemv_quantized.multiply``."""
    every, length = form.words.shape
    outputs = every // 2 if gated else every
    scales = form.scales
    out, summed = x.new_empty((1, outputs)), x if before is None else torch.empty_like(x)
    pdl = overlapping(x.device)
    blocks = triton.cdiv(outputs, 8 if gated else 16)
    _matrix[(min(blocks, _PROGRAMS * multiprocessors(x.device)),)](
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
        blocks,
        length // 2,
        _WARPS,
        _TILES,
        form.zeros is not None,
        form.brain,
        bias is not None,
        gated,
        before is not None,
        pdl,
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
        launch_pdl=pdl,
    )
    return out, summed
