"""PTX code that converts numbers of 4 and 8 bits, packed into 16-bit words, to 16-bit floats, two words at a time.

Each code converts two words in a register to two values in another, for Triton's ``inline_asm_elementwise`` with
``pack=2``. ``$0`` is the result, ``$1`` the words, and for NIBBLES ``$2`` the offset added to base + n.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch

__all__ = ["BYTES", "EIGHTHS", "NIBBLES", "PIECES", "SHIFTS", "WHOLE", "conversions", "wide_conversion"]

NIBBLES: Final = 1
"""0 .. 15, in the order of ``SHIFTS``."""
WHOLE: Final = 2
"""0 .. 255, which become -128 .. 127."""
BYTES: Final = 3
"""int8, two neighbours in a word."""
EIGHTHS: Final = 4
"""e4m3, two neighbours in a word."""

PIECES: Final = {NIBBLES: 4, WHOLE: 2, BYTES: 2, EIGHTHS: 2}
"""Values of a word."""


SHIFTS: Final = (0, 8, 4, 12)
"""Bit positions of the NIBBLES of a word: lower halves of bytes first, so that one mask selects two of them."""


@cache
def conversions(kind: int, dtype: torch.dtype) -> tuple[str, ...] | None:
    """The code of each piece of a word. ``dtype``: bfloat16 or float16."""
    if kind == NIBBLES:
        return tuple(_nibble(shift, dtype) for shift in SHIFTS)
    if kind in (WHOLE, BYTES):
        signed = kind == BYTES
        return tuple((_byte if dtype == torch.bfloat16 else _half_byte)(piece, signed) for piece in range(2))
    return (_eighth(0), _eighth(1)) if kind == EIGHTHS else None


def _nibble(shift: int, dtype: torch.dtype) -> str:
    """base | n, and $2 is added to it: exact, since base has the lowest bits free."""
    base, kind = (0x43004300, "bf16x2") if dtype == torch.bfloat16 else (0x64006400, "f16x2")
    one = 0x3F803F80 if dtype == torch.bfloat16 else 0x3C003C00
    moved = f"shr.b32 t, $1, {shift};" if shift else "mov.b32 t, $1;"
    return (
        "{ .reg .b32 t, one; "
        f"{moved} lop3.b32 t, t, 0x000f000f, {base:#x}, 0xea; mov.b32 one, {one:#x}; "
        f"fma.rn.{kind} $0, t, one, $2; }}"
    )


def _byte(piece: int, signed: bool) -> str:
    """0x4b000000 | n is 2^23 + n in float32; minus 2^23 + 128 it has 8 bits, which fit in the upper half."""
    flipped = "xor.b32 w, $1, 0x80808080;" if signed else "mov.b32 w, $1;"
    low, high = (0x7440, 0x7442) if piece == 0 else (0x7441, 0x7443)
    return (
        "{ .reg .b32 w, l, h; .reg .f32 a, b; "
        f"{flipped} prmt.b32 l, w, 0x4b000000, {low:#x}; prmt.b32 h, w, 0x4b000000, {high:#x}; "
        "mov.b32 a, l; mov.b32 b, h; add.rn.f32 a, a, 0fCB000080; add.rn.f32 b, b, 0fCB000080; "
        "mov.b32 l, a; mov.b32 h, b; prmt.b32 $0, l, h, 0x7632; }"
    )


def _half_byte(piece: int, signed: bool) -> str:
    flipped = "xor.b32 w, $1, 0x80808080;" if signed else "mov.b32 w, $1;"
    moved = "shr.b32 w, w, 8;" if piece else ""
    return (
        "{ .reg .b32 w, one, less; "
        f"{flipped} {moved} lop3.b32 w, w, 0x00ff00ff, 0x64006400, 0xea; "
        "mov.b32 one, 0x3c003c00; mov.b32 less, 0xe480e480; fma.rn.f16x2 $0, w, one, less; }"
    )


def _eighth(piece: int) -> str:
    """Exponent and mantissa move to where bfloat16 has its own, whose exponent is 120 larger."""
    if piece:
        moved = "and.b32 s, $1, 0x80008000; shr.b32 m, $1, 4;"
    else:
        moved = "shl.b32 s, $1, 8; and.b32 s, s, 0x80008000; shl.b32 m, $1, 4;"
    return (
        "{ .reg .b32 s, m, f, z; "
        f"{moved} lop3.b32 m, m, 0x07f007f0, s, 0xea; mov.b32 f, 0x7b807b80; mov.b32 z, 0x80008000; "
        "fma.rn.bf16x2 $0, m, f, z; }"
    )


def wide_conversion(kind: int) -> tuple[str, float]:
    """Four numbers of BYTES or EIGHTHS in ``$4`` to float32 in ``$0 .. $3`` (``pack=4``): each value is the result plus
    an offset. Returns the code and the offset.
    """
    if kind == BYTES:
        moved = "".join(f"prmt.b32 ${place}, w, 0x4b000000, 0x744{place}; " for place in range(4))
        return f"{{ .reg .b32 w; xor.b32 w, $4, 0x80808080; {moved}}}", -8388736.0
    # Two values at once to float16, which represents all of them, and from there to float32.
    halves = "cvt.rn.f16x2.e4m3x2 u, l; cvt.rn.f16x2.e4m3x2 v, h; mov.b32 {a, b}, u; mov.b32 {c, d}, v; "
    moved = "".join(f"cvt.f32.f16 ${place}, {name}; " for place, name in enumerate("abcd"))
    return f"{{ .reg .b16 l, h, a, b, c, d; .reg .b32 u, v; mov.b32 {{l, h}}, $4; {halves}{moved}}}", 0.0
