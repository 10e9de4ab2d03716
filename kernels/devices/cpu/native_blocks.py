"""Weights in blocks of integers of 2 to 6 bits, for the native products."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.devices.cpu.native.library import Library
from kernels.weights.gguf.blocks import Codes, Kind
from kernels.weights.quantization.gguf_weight import BlockRows, GgufWeight

__all__ = ["NativeBlocks", "NativeRows"]

_TABLE = 16
_OUTPUTS = 32
"""Outputs of a block."""
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

    def __init__(self, library: Library, rows: BlockRows, first: int) -> None:
        self.outputs, self.inputs, self.first = len(rows.data), rows.inputs, first
        layout = _layout(rows.kind)
        sizes = self.outputs, self.inputs
        self.memory = torch.empty(library.packed_blocks(ctypes.byref(layout), *sizes), dtype=torch.uint8)
        library.begin_blocks(ctypes.byref(layout), *sizes, self.memory.data_ptr())
        step = max(_OUTPUTS, _CHUNK // self.inputs // _OUTPUTS * _OUTPUTS)
        for begin in range(0, self.outputs, step):
            found = rows.kind.open(rows.data[begin : begin + step])
            held, blocks = _blocks(found)
            library.pack_blocks(ctypes.byref(blocks), begin, len(found.codes), self.inputs, self.memory.data_ptr())
            del held


class NativeBlocks:
    """A weight in blocks, ``rows`` of one type after another."""

    def __init__(self, library: Library, weight: GgufWeight) -> None:
        self.outputs, self.inputs = weight.shape
        self.rows: list[NativeRows] = []
        first = 0
        for piece in weight.pieces:
            self.rows.append(NativeRows(library, piece, first))
            first += len(piece.data)

    @staticmethod
    def fits(weight: GgufWeight) -> bool:
        """Whether there are native products with it."""
        return weight.dtype == torch.bfloat16

    @property
    def nbytes(self) -> int:
        return sum(rows.memory.nbytes for rows in self.rows)


def _layout(kind: Kind) -> _Layout:
    layout = _Layout(kind.bits, kind.block, kind.group, kind.zeros, -min(kind.values))
    if kind.bits == 4:
        layout.table[:] = [float(value) for value in kind.values]
    return layout


def _blocks(found: Codes) -> tuple[list[Tensor | None], _Blocks]:
    """And what must live until they were packed."""
    parts = (found.codes, found.scales, found.zeros, found.whole, found.whole_zeros)
    held = [None if part is None else part.contiguous() for part in parts]
    return held, _Blocks(*(None if part is None else part.data_ptr() for part in held))
