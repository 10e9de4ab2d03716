"""Weights in blocks of integers of 2 to 6 or of 8 bits, for the native products."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from kernels.devices.cpu.large_pages import empty_large
from kernels.devices.cpu.native.library import Library
from kernels.weights.gguf.blocks import Codes
from kernels.weights.quantization.gguf_weight import BlockRows, GgufWeight
from kernels.weights.quantization.weights import GroupedWeight, QuantizedWeight
from kernels.weights.tensors import Part

__all__ = ["NativeBlocks", "NativeRows"]

_TABLE = 16
_OUTPUTS = 32
"""Outputs of a block."""
_GROUP = 32
"""Inputs of a block of Q8_0 and Q4_0."""
_CHUNK = 1 << 24
"""Codes that are unpacked at a time."""


class _Layout(ctypes.Structure):
    """``Layout`` of kernels/devices/cpu/native/gguf_block_layout.h."""

    _fields_ = (
        ("bits", ctypes.c_int64),
        ("super", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("zeros", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("table", ctypes.c_float * _TABLE),
        ("filling", ctypes.c_int64 * 3),
    )


class _Blocks(ctypes.Structure):
    """``Blocks`` of gguf_block_layout.h."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("codes", "scales", "zeros", "group_scales", "group_zeros"))


class NativeRows:
    """Outputs of one type in the layout of gemm_gguf_blocks.h, from ``first`` on of the weight's."""

    def __init__(self, library: Library, rows: BlockRows | GroupedWeight, first: int) -> None:
        (self.outputs, self.inputs), self.first = rows.shape, first
        layout = _layout(rows)
        sizes = self.outputs, self.inputs
        self.memory = empty_large(library.packed_blocks(ctypes.byref(layout), *sizes), torch.uint8)
        library.begin_blocks(ctypes.byref(layout), *sizes, self.memory.data_ptr())
        step = max(_OUTPUTS, _CHUNK // self.inputs // _OUTPUTS * _OUTPUTS)
        for begin in range(0, self.outputs, step):
            result = _codes(rows, begin, min(begin + step, self.outputs))
            held, blocks = _blocks(result)
            library.pack_blocks(ctypes.byref(blocks), begin, len(result.codes), self.inputs, self.memory.data_ptr())
            del held


class NativeBlocks:
    """A weight in blocks, ``rows`` of one type after another."""

    def __init__(self, library: Library, weight: GgufWeight | GroupedWeight) -> None:
        self.outputs, self.inputs = weight.shape
        self.rows: list[NativeRows] = []
        first = 0
        for piece in weight.pieces if isinstance(weight, GgufWeight) else (weight,):
            self.rows.append(NativeRows(library, piece, first))
            first += piece.shape[0]

    @staticmethod
    def fits(weight: QuantizedWeight) -> TypeGuard[GgufWeight | GroupedWeight]:
        """Whether there are native products with it. Of weights in groups: with those of Q8_0 and Q4_0, whose scales of
        float16 lie beside the codes here."""
        if weight.dtype != torch.bfloat16:
            return False
        if not isinstance(weight, GroupedWeight):
            return isinstance(weight, GgufWeight)
        plain = weight.zeros is None and weight.order is None and weight.activation is None
        return plain and weight.group == _GROUP and weight.scales.dtype == torch.float16

    @property
    def nbytes(self) -> int:
        return sum(rows.memory.nbytes for rows in self.rows)


def _layout(rows: BlockRows | GroupedWeight) -> _Layout:
    if isinstance(rows, GroupedWeight):
        half = 1 << (rows.bits - 1)
        layout = _Layout(rows.bits, rows.group, rows.group, False, half)
        values: Sequence[int] = range(-half, half)
    else:
        kind = rows.kind
        layout = _Layout(kind.bits, kind.block, kind.group, kind.zeros, -min(kind.values))
        values = kind.values
    if layout.bits == 4:
        layout.table[:] = [float(value) for value in values]
    return layout


def _codes(rows: BlockRows | GroupedWeight, begin: int, end: int) -> Codes:
    """Those of the outputs from ``begin`` to ``end``."""
    if isinstance(rows, BlockRows):
        return rows.kind.open(rows.data[begin:end])
    some = rows.part(Part(0, begin, end))
    return Codes(some.unpacked().unflatten(1, (-1, rows.group)), some.scales)


def _blocks(codes: Codes) -> tuple[list[Tensor | None], _Blocks]:
    """And what must live until they were packed."""
    parts = (codes.codes, codes.scales, codes.zeros, codes.whole, codes.whole_zeros)
    held = [None if part is None else part.contiguous() for part in parts]
    return held, _Blocks(*(None if part is None else part.data_ptr() for part in held))
