"""Packs weights in groups into the layout of ``kernels.devices.cuda.matmul.gemm_small_quantized``, and dequantizes them
to 16 bits.

A tile of a row is ``words`` words of 16 bits. The first ``words`` of its inputs are the first value of each word, the
next ``words`` the second, and so on: the values of a word belong to as many ranges of the inputs. A group is some of
these ranges, or whole tiles.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.devices.cuda.matmul.gemm_small_quantized import Form, _grouped, _half, _number
from kernels.devices.cuda.matmul.number_conversions import NIBBLES, PIECES, WHOLE, conversions
from kernels.weights.quantization.weights import GroupedWeight

__all__ = ["pack", "tile_words", "widen"]

_WORDS: Final = (64, 32, 16)
_ROWS: Final = 16
_SMALLEST: Final = 6.2e-5  # float16 rounds smaller values more coarsely
_LARGEST: Final = 6.5e4


def tile_words(weight: GroupedWeight) -> int:
    """Words of a tile; 0 if its groups do not fit the layout."""
    pieces = PIECES[NIBBLES if weight.bits == 4 else WHOLE]
    for words in _WORDS:
        tile = words * pieces
        fits = weight.group % tile == 0 or (tile % weight.group == 0 and weight.group % words == 0)
        if fits and weight.shape[1] % tile == 0:
            return words
    return 0


def pack(weight: GroupedWeight) -> Form:
    """Pack ``weight`` on its device; the caller handles its ``order``."""
    kind = NIBBLES if weight.bits == 4 else WHOLE
    words, pieces = tile_words(weight), PIECES[kind]
    outputs, inputs = weight.shape
    tile = words * pieces
    parts = weight.unpacked().view(outputs, inputs // tile, pieces, words).unbind(2)
    low, high = (parts[0] | parts[2] << 4, parts[1] | parts[3] << 4) if kind == NIBBLES else parts
    packed = torch.stack((low, high), -1).view(torch.int16).view(outputs, inputs // pieces)
    if kind == WHOLE and weight.group == inputs and weight.zeros is None:
        return Form(kind, packed, weight.scales.float().view(outputs))
    slots = max(2, tile // weight.group)
    scales = _slots(_narrowed(weight.scales), weight.group, tile, slots)
    zeros = None
    if weight.zeros is not None:
        four = torch.zeros(outputs, inputs // tile, 4, dtype=torch.uint8, device=packed.device)
        four[:, :, :slots] = _slots(weight.zeros, weight.group, tile, slots)
        zeros = four.view(torch.int32)[:, :, 0].t().contiguous()
    pairs = scales.view(torch.int32).permute(1, 2, 0).contiguous()
    return Form(kind, packed, pairs, zeros, slots, scales.dtype == torch.bfloat16)


def _narrowed(scales: Tensor) -> Tensor:
    """Convert scales to 16 bits: float16, which is more precise, if its range suffices."""
    if scales.itemsize == 2:
        return scales
    size = scales.abs()
    fits = bool(size.max() <= _LARGEST) and not bool(((size > 0) & (size < _SMALLEST)).any())
    return scales.to(torch.float16 if fits else torch.bfloat16)


def _slots(values: Tensor, group: int, tile: int, slots: int) -> Tensor:
    """[outputs, groups] -> [outputs, tiles, slots], dense."""
    if group < tile:
        return values.unflatten(1, (-1, tile // group)).repeat_interleave(slots * group // tile, 2).contiguous()
    return values.repeat_interleave(group // tile, 1)[:, :, None].repeat(1, 1, slots)


@triton.jit
def dequantize_kernel(
    words,
    scales,
    zeros,
    out,
    outputs,
    length,
    kind: tl.constexpr,
    pieces: tl.constexpr,
    slots: tl.constexpr,
    brain: tl.constexpr,
    zeroed: tl.constexpr,
    code: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
):
    """A tile of some rows."""
    index = tl.program_id(1)
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    at = tl.arange(0, width)
    here = row < outputs
    like: tl.constexpr = out.dtype.element_ty
    mask = here[:, None] & (at < width)[None, :]
    word = tl.load(words + row[:, None].to(tl.int64) * length + index * width + at[None, :], mask=mask, other=0)
    zero = row
    if zeroed:
        zero = tl.load(zeros + index * outputs + row, mask=here, other=0)
    to = out + row[:, None].to(tl.int64) * (length * pieces) + index * width * pieces + at[None, :]
    for piece in tl.static_range(pieces):
        if slots > 0:
            number = _grouped(word, zero, kind, piece, piece * slots // pieces, zeroed, code, like)
            two = tl.load(
                scales + (index * (slots // 2) + piece * slots // pieces // 2) * outputs + row, mask=here, other=0
            )
            scale = _half(two, piece * slots // pieces % 2, tl.bfloat16 if brain else tl.float16).to(tl.float32)
        else:
            number = _number(word, word, kind, piece, code, like)
            scale = tl.load(scales + row, mask=here, other=0.0)
        tl.store(to + piece * width, (number.to(tl.float32) * scale[:, None]).to(like), mask=mask)


def widen(form: Form, words: int, out: Tensor) -> None:
    """Dequantize the ``form`` in tiles of ``words`` to ``out`` [outputs, inputs], contiguous."""
    outputs, length = form.words.shape
    assert form.scales is not None
    dequantize_kernel[(triton.cdiv(outputs, _ROWS), length // words)](
        form.words,
        form.scales,
        form.scales if form.zeros is None else form.zeros,
        out,
        outputs,
        length,
        form.kind,
        PIECES[form.kind],
        form.slots,
        form.brain,
        form.zeros is not None,
        conversions(form.kind, out.dtype) if out.device.type != "cpu" else None,
        _ROWS,
        words,
        num_warps=4,
    )
