"""``kernels.devices.cuda.matmul.gemv_int4_mma`` for Triton's interpreter; see ``plain``."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import kernels.devices.cuda.matmul.gemv_int4_mma
import kernels.devices.cuda.matmul.packed_arithmetic
from tests.kernels.devices.cuda.plain import EMULATED, in_triton

__all__ = ["matrix_in_triton"]

MULTIPLIED = """
@triton.jit
def in_bytes(a, b, c, d):
    left = (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | (d << 24)
    a, b, c, d = a + 128 >> 8, b + 128 >> 8, c + 128 >> 8, d + 128 >> 8
    return left, (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | (d << 24)


@triton.jit
def columns(word, place: tl.constexpr):
    side = tl.arange(0, 2)[None, :, None, None]
    return tl.sum(number(word, place, True) * (1 + 255 * side), 1, keep_dims=True)


@triton.jit
def row(word, token, upper: tl.constexpr):
    word = word & (-0x0F0F0F10 if upper else 0x0F0F0F0F)
    found = number(word, 0, False) * columns(token, 0) + number(word, 1, False) * columns(token, 1)
    found += number(word, 2, False) * columns(token, 2) + number(word, 3, False) * columns(token, 3)
    return tl.sum(found, 3, keep_dims=True) + tl.zeros_like(word)


@triton.jit
def sums_of(one, two, token, upper: tl.constexpr):
    found, further = tl.zeros_like(one[0]), tl.zeros_like(one[0])
    for at in tl.static_range(8):
        found += row(one[at], token[at], upper)
        further += row(two[at], token[at], upper)
    return found, further


@triton.jit
def total_of(token):
    found = tl.zeros_like(token[0])
    for at in tl.static_range(8):
        found += row(tl.zeros_like(token[at]) + 0x01010101, token[at], False)
    return found
"""


def matrix_in_triton(directory: Path) -> ModuleType:
    """The module for the CPU, its source in ``directory``."""
    return in_triton(
        directory,
        "matrix_in_triton",
        EMULATED + MULTIPLIED,
        kernels.devices.cuda.matmul.packed_arithmetic,
        kernels.devices.cuda.matmul.gemv_int4_mma,
    )
