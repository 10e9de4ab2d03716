"""The quantization scheme of GGUF files, whose projections stay quantized where they can.

Q8_0 and Q4_0 become integer weights in groups, tables of embeddings, too. The types of kernels/weights/gguf/blocks.py
stay in their blocks, and so do experts in MXFP4. All other types are dequantized at load.

A block of Q8_0 or Q4_0 holds 32 inputs of an output: its scale in float16, then integers. Q8_0: 32 signed bytes. Q4_0:
16 bytes; byte j, as MXFP4's, has input j in its low half and input j + 16 in its high half, each with an offset of 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.weights.gguf.blocks import KINDS, half
from kernels.weights.gguf.checkpoint import factor_of, not_finite
from kernels.weights.gguf.header import GgufHeader
from kernels.weights.gguf.joined import cut
from kernels.weights.quantization.gguf_weight import BlockRows, GgufWeight
from kernels.weights.quantization.mxfp4 import Mxfp4Weight
from kernels.weights.quantization.scheme import Files, Scheme, StoredTensor
from kernels.weights.quantization.weights import GroupedWeight, QuantizedWeight
from kernels.weights.tensors import TensorSpec

__all__ = ["GgufScheme"]

_BLOCK = 32
_Q4_0, _Q8_0 = 2, 8
_MXFP4, _MXFP4_BYTES = 39, 17
_NAN = 255  # the exponent of e8m0 that is not a number
_BYTES = {_Q4_0: 18, _Q8_0: 34}
_NO_FACTORS = (".ffn_gate_inp.scale", ".ffn_down_exps.scale")
"""Tensors of Gemma 4 that are named like factors."""


class GgufScheme(Scheme):
    """The scheme of the file of ``header``. The loader has checked that all tensors lie within the file."""

    name = "gguf"

    def __init__(self, header: GgufHeader) -> None:
        tensors = header.tensors
        if header.metadata.get("general.architecture") == "gemma4":
            tensors = {name: info for name, info in tensors.items() if not name.endswith(_NO_FACTORS)}
        self._tensors = {**tensors, **cut(tensors)}

    def _kind(self, weight: TensorSpec) -> int:
        """The type of the weight's blocks; -1: the weight is dequantized, because blocks have no place for a factor."""
        foreign = self._foreign(weight)
        result = self._tensors.get(foreign)
        return -1 if result is None or factor_of(foreign) in self._tensors else result.kind

    def _foreign(self, weight: TensorSpec) -> str:
        """The weight's name in the file; "" for a tensor that GGUF files do not have."""
        if weight.gguf is not None and weight.gguf.name in self._tensors:
            return weight.gguf.name
        return "" if weight.stacked is None else weight.stacked.gguf

    def tensors(self, weight: TensorSpec) -> dict[str, StoredTensor] | None:
        number, shape, module = self._kind(weight), weight.matrix, weight.module
        columns = None if weight.gguf is None else weight.gguf.columns
        if columns is not None and columns.run % (KINDS[number].block if number in KINDS else _BLOCK):
            return None  # blocks hold inputs that come apart
        if number == _MXFP4 and weight.stacked is not None:
            row = shape[1] // _BLOCK * _MXFP4_BYTES
        elif number in KINDS:
            row = shape[1] // KINDS[number].block * KINDS[number].size
        elif number in _BYTES:
            row = shape[1] // _BLOCK * _BYTES[number]
        else:
            return None
        return {f"{module}.weight": StoredTensor(("U8",), ((shape[0], row),))}

    def keeps_table(self, table: TensorSpec) -> bool:
        return self._kind(table) in (*KINDS, *_BYTES)

    def read(self, files: Files, weight: TensorSpec) -> QuantizedWeight:
        kind, shape, module = self._kind(weight), weight.matrix, weight.module
        if kind == _MXFP4:
            blocks = files.read(f"{module}.weight").view(shape[0], -1, _MXFP4_BYTES)
            if bool((blocks[:, :, 0] == _NAN).any()):
                raise not_finite(self._foreign(weight))
            return Mxfp4Weight.from_blocks(_paired(blocks[:, :, 1:]), blocks[:, :, 0], torch.bfloat16)
        if kind in KINDS:
            data = files.read(f"{module}.weight").view(shape[0], -1, KINDS[kind].size)
            for at in KINDS[kind].halves:
                _check(self._foreign(weight), half(data, at))
            return GgufWeight((BlockRows(KINDS[kind], data),))
        blocks = files.read(f"{module}.weight").view(shape[0], shape[1] // _BLOCK, _BYTES[kind])
        scales = half(blocks, 0)
        _check(self._foreign(weight), scales)
        if kind == _Q8_0:
            values = (blocks[:, :, 2:] ^ 0x80).view(shape)  # a signed byte and 128
            return GroupedWeight(values, scales, None, _BLOCK, 8)
        return GroupedWeight(_paired(blocks[:, :, 2:]).view(shape[0], shape[1] // 2), scales, None, _BLOCK, 4)


def _check(foreign: str, scales: Tensor) -> None:
    if not bool(scales.isfinite().all()):
        raise not_finite(foreign)


def _paired(halves: Tensor) -> Tensor:
    """Bytes of inputs j and j + 16 -> bytes of inputs 2j and 2j + 1."""
    single = torch.cat((halves & 15, halves >> 4), -1)
    return single[..., 0::2] | (single[..., 1::2] << 4)
