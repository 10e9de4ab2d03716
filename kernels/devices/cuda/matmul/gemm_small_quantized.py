"""Matrix products of a few tokens with weights of 8 or 4 bits, which are dequantized to 16 bits in registers.

Such a product is bound by reading the weight once, so a program keeps many tiles of it in flight: some rows, and of
each the inputs that fill 128 bytes. They are the left operand of the matrix unit, which may come from registers; tokens
are the right operand, even a single one. If there are too few rows to fill the device, each is split into parts. The
part that finishes last adds them up, always in the same order.

Packed weights are read as words of 16 bits, so that a word and the numbers in it use the same registers. Integer to
float conversion is slow on GPUs (a sixteenth of the lanes: CUDA programming guide, "Arithmetic Instructions"). Writing
an integer into the lowest bits of a known float is fast: 0x4300 | n is 128 + n in bfloat16, 0x6400 | n is 1024 + n in
float16 (Kim et al., arXiv 2211.10017, section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.devices.cuda.launch import has_gluon, overlapping
from kernels.devices.cuda.matmul.number_conversions import BYTES, EIGHTHS, NIBBLES, PIECES, conversions

__all__ = ["MAX_TOKENS", "Form", "Tiles", "counters", "multiply", "single_suits", "token_block"]

MAX_TOKENS: Final = 64
_PROGRAMS: Final = 264  # programs that fill the device: 2 on each of 132 multiprocessors
_MIN_TILES: Final = 2  # fewest tiles of a part
_SINGLE_INPUTS: Final = 32768
_MIN_TOKENS: Final = 8  # fewest tokens of the matrix unit's product


@dataclass(frozen=True)
class Tiles:
    """The tiling of a product: a program processes ``rows`` rows of the weight, ``words`` words (of 16 bits) at a time,
    with ``stages`` tiles in flight.
    """

    rows: int
    words: int
    stages: int
    warps: int


@dataclass(frozen=True, eq=False)
class Form:
    """A weight of one ``kind`` of ``kernels.devices.cuda.matmul.number_conversions``. ``words`` [outputs, words of
    16 bits].

    ``scales``: float32 [outputs], or with ``slots`` int32 [tiles, slots / 2, outputs]: two numbers in 16 bits each, so
    that a tile has ``slots`` of them, bfloat16 if ``brain``, else float16. ``zeros`` int32 [tiles,
    outputs], a byte for each slot; None: the middle.
    """

    kind: int
    words: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    slots: int = 0
    brain: bool = False


@triton.jit
def _prefetch(place):
    """Prefetch 256 bytes at each address to the L2 cache."""
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], 256; mov.u32 $0, 0; }",
        "=r,l",
        [place.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _half(word, which: tl.constexpr, like: tl.constexpr):
    """One of the two 16-bit values in a 32-bit word."""
    if which == 1:
        word = word >> 16
    return word.to(tl.int16).to(like, bitcast=True)


@triton.jit
def _number(word, minus, kind: tl.constexpr, piece: tl.constexpr, code: tl.constexpr, like: tl.constexpr):
    """Value ``piece`` of each word. ``minus``, of the shape of the word: for NIBBLES the offset added to base + n."""
    if code is not None:
        if kind == 1:
            number = tl.inline_asm_elementwise(
                code[piece], "=r,r,r", [word, minus], dtype=tl.int16, is_pure=True, pack=2
            )
        else:
            number = tl.inline_asm_elementwise(code[piece], "=r,r", [word], dtype=tl.int16, is_pure=True, pack=2)
        number = number.to(like, bitcast=True)
    elif kind == 1:
        base: tl.constexpr = 128.0 if like == tl.bfloat16 else 1024.0
        whole = ((word >> (piece % 2 * 8 + piece // 2 * 4)) & 15).to(tl.float32) + base
        number = (whole + minus.to(like, bitcast=True).to(tl.float32)).to(like)
    elif kind == 2:
        number = (((word >> (8 * piece)) & 255) - 128).to(tl.float32).to(like)
    elif kind == 3:
        number = ((((word >> (8 * piece)) & 255) ^ 128) - 128).to(tl.float32).to(like)
    else:
        byte = ((word >> (8 * piece)) & 255).to(tl.uint8)
        number = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(like)
    return number


@triton.jit
def _grouped(
    word,
    zero,
    kind: tl.constexpr,
    piece: tl.constexpr,
    slot: tl.constexpr,
    zeroed: tl.constexpr,
    code: tl.constexpr,
    like: tl.constexpr,
):
    """The same, minus the zero point of its group."""
    shape: tl.constexpr = word.shape
    if kind == 1:
        base: tl.constexpr = -15616 if like == tl.bfloat16 else -7168  # 0xc300: -128, 0xe400: -1024
        if zeroed:
            less = ((zero >> (8 * slot)) & 255).to(tl.int16) | base
            minus = tl.broadcast_to(less[:, None], shape)
        else:
            minus = tl.full(shape, base + 8, tl.int16)
        number = _number(word, minus, kind, piece, code, like)
    else:
        number = _number(word, word, kind, piece, code, like)
        if zeroed:
            number += (128 - ((zero >> (8 * slot)) & 255)).to(tl.float32).to(like)[:, None]
    return number


@triton.jit(do_not_specialize=["tokens", "splits"])
def gemm_small_quantized_kernel(
    x,
    words,
    scales,
    zeros,
    bias,
    out,
    partial,
    arrived,
    tokens,
    outputs,
    length,
    splits,
    kind: tl.constexpr,
    pieces: tl.constexpr,
    slots: tl.constexpr,
    brain: tl.constexpr,
    zeroed: tl.constexpr,
    code: tl.constexpr,
    token_block: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
    stages: tl.constexpr,
    split: tl.constexpr,
    biased: tl.constexpr,
    gated: tl.constexpr,
    ahead: tl.constexpr,
    pdl: tl.constexpr,
):
    """``rows`` rows of the weight a program; ``length``: words of each. ``gated``: silu of half of them is multiplied
    by the other half, ``outputs`` rows further.
    """
    like: tl.constexpr = out.dtype.element_ty
    tile, part_of = tl.program_id(0), tl.program_id(1)
    kept: tl.constexpr = rows // 2 if gated else rows  # outputs of a program
    of = tl.arange(0, rows)
    row = tl.minimum(tile * kept + of % kept, outputs - 1) + of // kept * outputs
    every = outputs * (rows // kept)
    token = tl.arange(0, token_block)
    at = tl.arange(0, width)
    tiles = length // width
    share = (tiles + splits - 1) // splits
    begin = part_of * share
    end = tl.minimum(begin + share, tiles)
    first = words + row[:, None].to(tl.int64) * length + at[None, :]
    inputs = length * pieces
    natural: tl.constexpr = kind >= 3  # the values of a word are neighbours
    value = x + token[:, None] * (inputs // 2 if natural else inputs) + at[None, :]
    there = (token < tokens)[:, None]
    if pdl:
        gdc_launch_dependents()
        if ahead:
            near = words + row.to(tl.int64) * length + tl.minimum(begin * width, length - 256)  # within the row
            _prefetch(near)
            _prefetch(near + 128)
        gdc_wait()
    total = tl.zeros([rows, token_block], tl.float32)
    for index in tl.range(begin, end, num_stages=stages):
        word = tl.load(first + index * width, eviction_policy="evict_first")
        if slots > 0:
            zero = row
            if zeroed:
                zero = tl.load(zeros + index * every + row)
            scale = tl.load(scales + index * (slots // 2) * every + row)
            if slots > 2:
                finer = tl.load(scales + (index * (slots // 2) + 1) * every + row)
        if natural:
            both = tl.load(value + index * width, mask=there, other=0)
        part = total
        if slots > 0:
            part = tl.zeros([rows, token_block], tl.float32)
        for piece in tl.static_range(pieces):
            if natural:
                v = _half(both, piece, like)
            else:
                v = tl.load(value + index * width * pieces + piece * width, mask=there, other=0.0)
            if slots > 0:
                number = _grouped(word, zero, kind, piece, piece * slots // pieces, zeroed, code, like)
            else:
                number = _number(word, word, kind, piece, code, like)
            part = tl.dot(number, tl.trans(v), part)
            if slots > 0 and (piece + 1) * slots % pieces == 0:
                two = scale if piece * slots // pieces < 2 else finer
                size_of = _half(two, piece * slots // pieces % 2, tl.bfloat16 if brain else tl.float16)
                total += part * size_of.to(tl.float32)[:, None]
                part = tl.zeros([rows, token_block], tl.float32)
        if slots == 0:
            total = part
    if split:
        size: tl.constexpr = rows * token_block
        place = of[:, None] * token_block + token[None, :]
        mine = partial + tile.to(tl.int64) * splits * size
        tl.store(mine + part_of * size + place, total, mask=(token < tokens)[None, :])
        tl.debug_barrier()
        before = tl.atomic_add(arrived + tile, 1, sem="acq_rel")
        if before < splits - 1:
            return
        tl.debug_barrier()
        tl.store(arrived + tile, 0)
        total = tl.zeros([rows, token_block], tl.float32)
        for number_of in range(splits):
            total += tl.load(
                mine + number_of * size + place, mask=(token < tokens)[None, :], other=0.0, cache_modifier=".cg"
            )
    if slots == 0:
        total *= tl.load(scales + row)[:, None]
    if biased:
        total += tl.load(bias + row).to(tl.float32)[:, None]
    if gated:
        # Rounded as the product is where the activation is an operator of its own.
        total = total.to(like).to(tl.float32)
        gate, up = tl.split(total.reshape(2, kept, token_block).permute(1, 2, 0))
        total = gate * tl.sigmoid(gate) * up
    output = tile * kept + tl.arange(0, kept)
    result = out + token[None, :] * outputs + output[:, None]
    tl.store(result, total.to(like), mask=(token < tokens)[None, :] & (output < outputs)[:, None])


def counters(outputs: int, device: torch.device) -> Tensor:
    """The counters of finished parts that ``multiply`` takes; they are zero between products."""
    return torch.zeros(triton.cdiv(outputs, 32), dtype=torch.int32, device=device)


def single_suits(form: Form, x: Tensor) -> bool:
    """Whether ``kernels.devices.cuda.matmul.gemv_quantized`` can multiply one token by the weight. It is written in
    Gluon, which Triton may
    lack and has no interpreter for.
    """
    length = form.words.shape[1]
    if x.device.type == "cpu" or length % 8 or length * PIECES[form.kind] > _SINGLE_INPUTS:
        return False
    return (form.kind in (BYTES, EIGHTHS) or (form.kind == NIBBLES and form.slots == 2)) and has_gluon(
        "matmul.gemv_quantized"
    )


def token_block(tokens: int) -> int:
    """Tokens of a matrix instruction."""
    return max(_MIN_TOKENS, triton.next_power_of_2(tokens))


def multiply(x: Tensor, form: Form, bias: Tensor | None, arrived: Tensor, gated: bool, tiles: Tiles) -> Tensor:
    """``x`` [tokens, inputs], dense -> [tokens, outputs], or half as many. ``arrived``: of ``counters``."""
    outputs, length = form.words.shape
    outputs = outputs // 2 if gated else outputs
    pieces = PIECES[form.kind]
    programs = triton.cdiv(outputs, tiles.rows // 2 if gated else tiles.rows)
    splits = max(1, min(_PROGRAMS // programs, length // tiles.words // _MIN_TILES))
    block = token_block(len(x))
    out = x.new_empty((len(x), outputs))
    partial = out if splits == 1 else x.new_empty(programs * splits * tiles.rows * block, dtype=torch.float32)
    pdl = overlapping(x.device)
    gemm_small_quantized_kernel[(programs, splits)](
        x.view(torch.int32) if form.kind in (BYTES, EIGHTHS) else x,
        form.words,
        form.scales,
        form.scales if form.zeros is None else form.zeros,
        form.words if bias is None else bias,
        out,
        partial,
        arrived,
        len(x),
        outputs,
        length,
        splits,
        form.kind,
        pieces,
        form.slots,
        form.brain,
        form.zeros is not None,
        conversions(form.kind, x.dtype) if x.device.type != "cpu" else None,
        block,
        tiles.rows,
        tiles.words,
        tiles.stages,
        splits > 1,
        bias is not None,
        gated,
        length >= 256,
        pdl,
        num_warps=tiles.warps,
        launch_pdl=pdl,
    )
    return out
