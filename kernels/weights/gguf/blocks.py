"""Layouts of the blocks of a GGUF file (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h).

A weight is ``scale * value - zero``. ``value`` is decoded from a code of 2 to 6 bits. Scale and zero belong to the
block; the K types multiply them with integers of each group of 16 or 32 numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["KINDS", "Codes", "Kind", "half"]


@dataclass(frozen=True)
class Codes:
    """``codes`` uint8 [rows, blocks, block]; ``scales`` and ``zeros`` float16 [rows, blocks]; ``whole`` int8 and
    ``whole_zeros`` uint8 [rows, blocks, groups], which multiply them."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    whole: Tensor | None = None
    whole_zeros: Tensor | None = None


@dataclass(frozen=True)
class Kind:
    """A type of blocks. ``number``: its id in files. ``block``: inputs of a block, of which ``group`` share scale and
    zero; ``size``: bytes of a block. ``bits``: bits of a code; ``values``: the value of each code. ``halves``: offsets
    of the float16 numbers. ``open``: decodes uint8 [rows, blocks, size].
    """

    name: str
    number: int
    block: int
    group: int
    size: int
    bits: int
    values: tuple[int, ...]
    zeros: bool
    halves: tuple[int, ...]
    open: Callable[[Tensor], Codes]


def half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte ``at`` of each block."""
    return blocks[:, :, at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack 4-bit numbers: uint8 [..., n] -> [..., 2 n], all low halves first."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _bits(packed: Tensor, size: int) -> Tensor:
    """Unpack numbers of ``size`` bits: uint8 [..., n] -> [..., 8 / size, n], lowest bits first."""
    shifts = torch.arange(0, 8, size, dtype=torch.uint8)[:, None]
    return (packed.unsqueeze(-2) >> shifts) & ((1 << size) - 1)


def _row_of_bits(packed: Tensor) -> Tensor:
    """Unpack single bits: uint8 [..., n] -> [..., 8 n]."""
    return _bits(packed, 1).transpose(-1, -2).flatten(-2)


def _q4_1(blocks: Tensor) -> Codes:
    return Codes(_nibbles(blocks[:, :, 4:]), half(blocks, 0), -half(blocks, 2))


def _q5_0(blocks: Tensor) -> Codes:
    return Codes(_nibbles(blocks[:, :, 6:]) | _row_of_bits(blocks[:, :, 2:6]) << 4, half(blocks, 0))


def _q5_1(blocks: Tensor) -> Codes:
    codes = _nibbles(blocks[:, :, 8:]) | _row_of_bits(blocks[:, :, 4:8]) << 4
    return Codes(codes, half(blocks, 0), -half(blocks, 2))


def _q2_k(blocks: Tensor) -> Codes:
    factors, packed = blocks[:, :, :16], blocks[:, :, 16:80].unflatten(-1, (2, 32))
    codes = _bits(packed, 2).flatten(2)
    return Codes(codes, half(blocks, 80), half(blocks, 82), (factors & 15).view(torch.int8), factors >> 4)


def _q3_k(blocks: Tensor) -> Codes:
    high, packed = blocks[:, :, :32], blocks[:, :, 32:96].unflatten(-1, (2, 32))
    codes = _bits(packed, 2).flatten(2) | _bits(high, 1).flatten(2) << 2
    factors = _nibbles(blocks[:, :, 96:104]) | _bits(blocks[:, :, 104:108], 2).flatten(2) << 4
    return Codes(codes, half(blocks, 108), None, factors.view(torch.int8) - 32)


def _factors_k(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight zeros of 6 bits, packed into 12 bytes: four of each in the low bits of a byte, the others
    split into 4-bit halves and the remaining high bits."""
    first, second, third = packed.split(4, -1)
    scales = torch.cat((first & 63, (third & 15) | (first >> 6) << 4), -1)
    return scales.view(torch.int8), torch.cat((second & 63, (third >> 4) | (second >> 6) << 4), -1)


def _q4_k(blocks: Tensor) -> Codes:
    codes = _nibbles(blocks[:, :, 16:].unflatten(-1, (4, 32))).flatten(2)
    return Codes(codes, half(blocks, 0), half(blocks, 2), *_factors_k(blocks[:, :, 4:16]))


def _q5_k(blocks: Tensor) -> Codes:
    codes = _nibbles(blocks[:, :, 48:].unflatten(-1, (4, 32))).flatten(2)
    codes |= _bits(blocks[:, :, 16:48], 1).flatten(2) << 4
    return Codes(codes, half(blocks, 0), half(blocks, 2), *_factors_k(blocks[:, :, 4:16]))


def _q6_k(blocks: Tensor) -> Codes:
    low = _nibbles(blocks[:, :, :128].unflatten(-1, (2, 64)))
    high = _bits(blocks[:, :, 128:192].unflatten(-1, (2, 32)), 2).flatten(3)
    return Codes((low | high << 4).flatten(2), half(blocks, 208), None, blocks[:, :, 192:208].view(torch.int8))


def _iq4_nl(blocks: Tensor) -> Codes:
    return Codes(_nibbles(blocks[:, :, 2:]), half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Codes:
    codes = _nibbles(blocks[:, :, 8:].unflatten(-1, (8, 16))).flatten(2)
    high = _bits(blocks[:, :, 2:4], 2).transpose(-1, -2).flatten(2)
    low = _bits(blocks[:, :, 4:8], 4).transpose(-1, -2).flatten(2)
    return Codes(codes, half(blocks, 0), None, (low | high << 4).view(torch.int8) - 32)


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

_ALL = (
    Kind("Q4_1", 3, 32, 32, 20, 4, tuple(range(16)), True, (0, 2), _q4_1),
    Kind("Q5_0", 6, 32, 32, 22, 5, tuple(range(-16, 16)), False, (0,), _q5_0),
    Kind("Q5_1", 7, 32, 32, 24, 5, tuple(range(32)), True, (0, 2), _q5_1),
    Kind("Q2_K", 10, 256, 16, 84, 2, tuple(range(4)), True, (80, 82), _q2_k),
    Kind("Q3_K", 11, 256, 16, 110, 3, tuple(range(-4, 4)), False, (108,), _q3_k),
    Kind("Q4_K", 12, 256, 32, 144, 4, tuple(range(16)), True, (0, 2), _q4_k),
    Kind("Q5_K", 13, 256, 32, 176, 5, tuple(range(32)), True, (0, 2), _q5_k),
    Kind("Q6_K", 14, 256, 16, 210, 6, tuple(range(-32, 32)), False, (208,), _q6_k),
    Kind("IQ4_NL", 20, 32, 32, 18, 4, _IQ4, False, (0,), _iq4_nl),
    Kind("IQ4_XS", 23, 256, 32, 136, 4, _IQ4, False, (0,), _iq4_xs),
)
KINDS: dict[int, Kind] = {kind.number: kind for kind in _ALL}
"""The types that are decoded here, by number."""
