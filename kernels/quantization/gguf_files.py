"""GGUF files: projections stay quantized. Q8_0 and Q4_0 as whole weights of groups, the types of kernels/gguf/blocks.py
in their blocks; the rest become floats while loading.

A block of Q8_0 and Q4_0 is 32 inputs of an output: its scale in float16, then whole numbers. Q8_0: 32 signed bytes.
Q4_0: 16 bytes, byte j with input j in its low half and input j + 16 in its high one, each 8 more than it stands for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gguf.blocks import KINDS, half
from kernels.gguf.checkpoint import factor_of, not_finite
from kernels.gguf.header import GgufHeader
from kernels.gguf.joined import cut
from kernels.gguf.names import Names, experts_apart
from kernels.quantization.gguf_weight import BlockRows, GgufWeight
from kernels.quantization.scheme import Files, Scheme, Stored
from kernels.quantization.weights import GroupedWeight, QuantizedWeight

__all__ = ["GgufScheme"]

_BLOCK = 32
_Q4_0, _Q8_0 = 2, 8
_BYTES = {_Q4_0: 18, _Q8_0: 34}


class GgufScheme(Scheme):
    """``header``: of the file. The loader has checked that what is read here lies in it."""

    name = "gguf"

    def __init__(self, header: GgufHeader) -> None:
        self._tensors = cut(header.tensors)
        self._names = Names(experts_apart(self._tensors))

    def _kind(self, module: str) -> int:
        """-1 of one that becomes floats: blocks have no place for a factor."""
        foreign = self._foreign(module)
        found = self._tensors.get(foreign)
        return -1 if found is None or factor_of(foreign) in self._tensors else found.kind

    def _foreign(self, module: str) -> str:
        return self._names.foreign(f"{module}.weight")

    def tensors(self, module: str, shape: tuple[int, int]) -> dict[str, Stored] | None:
        number = self._kind(module)
        if number in KINDS:
            row = shape[1] // KINDS[number].block * KINDS[number].size
        elif number in _BYTES:
            row = shape[1] // _BLOCK * _BYTES[number]
        else:
            return None
        return {f"{module}.weight": Stored(("U8",), ((shape[0], row),))}

    def keeps_table(self, module: str) -> bool:
        return self._kind(module) in KINDS

    def read(self, files: Files, module: str, shape: tuple[int, int]) -> QuantizedWeight:
        kind = self._kind(module)
        if kind in KINDS:
            data = files.read(f"{module}.weight").view(shape[0], -1, KINDS[kind].size)
            for at in KINDS[kind].halves:
                _check(self._foreign(module), half(data, at))
            return GgufWeight((BlockRows(KINDS[kind], data),))
        blocks = files.read(f"{module}.weight").view(shape[0], shape[1] // _BLOCK, _BYTES[kind])
        scales = half(blocks, 0)
        _check(self._foreign(module), scales)
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
