"""Weights of which there are native products, and the operators that multiply with them."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from kernels.devices.cpu.large_pages import empty_large
from kernels.devices.cpu.native.library import Op
from kernels.devices.cpu.native_blocks import NativeBlocks
from kernels.devices.cpu.native_fp8 import NativeFp8
from kernels.devices.cpu.native_grouped import NativeGrouped
from kernels.devices.cpu.native_int8 import NativeInt8
from kernels.devices.cpu.recording import OperatorRunner

__all__ = ["AnyWeight", "HeadWeights", "MatmulOps", "NativeWeight", "products"]

_LINEAR = 3
_LINEAR8, _GROUPED, _BLOCKS = range(11, 14)
_FP8 = 18


class NativeWeight:
    """A weight in the layout of the native products."""

    def __init__(self, native: OperatorRunner, weight: Tensor) -> None:
        self.outputs, self.inputs = weight.shape
        self.memory = empty_large(native.library.packed(self.outputs, self.inputs), torch.bfloat16)
        source = weight.contiguous()
        native.library.pack(source.data_ptr(), self.outputs, self.inputs, self.memory.data_ptr())


class HeadWeights:
    """Weights [heads, outputs, inputs], one for each head, in the layout of the native products, one after the
    other."""

    def __init__(self, native: OperatorRunner, weights: Tensor) -> None:
        heads, self.outputs, self.inputs = weights.shape
        each = native.library.packed(self.outputs, self.inputs)
        self.memory = empty_large(heads * each, torch.bfloat16)
        for head, weight in enumerate(weights):
            source = weight.contiguous()
            place = self.memory[head * each :].data_ptr()
            native.library.pack(source.data_ptr(), self.outputs, self.inputs, place)


AnyWeight: TypeAlias = NativeWeight | NativeInt8 | NativeGrouped | NativeFp8 | NativeBlocks
MatmulOps: TypeAlias = list[tuple[Op, int, tuple[Tensor | None, ...]]]
"""Operators without tokens and results, the outputs before each one's, and what must live while they are used."""


def products(weight: AnyWeight, bias: Tensor | None, gated: bool = False) -> MatmulOps:
    """The operators that multiply with a weight, one after the other along its outputs. ``gated``: these are gates and
    as many others, of which ``silu(gates) * others`` results; of one type, where a weight is in blocks."""
    if isinstance(weight, NativeBlocks):
        result: MatmulOps = []
        for rows in weight.rows:
            op = Op(kind=_BLOCKS, b=rows.memory.data_ptr(), i0=rows.inputs, i1=rows.outputs, gated=gated)
            op.c = None if bias is None else bias[rows.first :].data_ptr()
            result.append((op, rows.first, (rows.memory, bias)))
        return result
    op = Op(kind=_LINEAR, b=weight.memory.data_ptr(), i0=weight.inputs, i1=weight.outputs, gated=gated)
    op.c = None if bias is None else bias.data_ptr()
    if isinstance(weight, NativeInt8):
        op.kind, op.i2, op.f0 = _LINEAR8, weight.offset, weight.scale
    if isinstance(weight, NativeFp8):
        op.kind, op.i2 = _FP8, weight.group
    if not isinstance(weight, NativeGrouped):
        return [(op, 0, (weight.memory, bias))]
    op.kind, op.i2, op.i3 = _GROUPED, weight.group, weight.bits
    op.i4 = 0 if weight.order is None else weight.order.data_ptr()
    op.f0 = weight.zeroed
    return [(op, 0, (weight.memory, bias, weight.order))]
