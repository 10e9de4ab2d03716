"""Weights in the blocks of a GGUF file, byte for byte as the file stores them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from kernels.weights.gguf.blocks import Kind
from kernels.weights.quantization.weights import PartError, QuantizedWeight
from kernels.weights.tensors import Part

__all__ = ["BlockRows", "GgufWeight"]

_CHUNK = 1 << 22
"""Elements that are dequantized at a time."""


@dataclass(frozen=True)
class BlockRows:
    """Consecutive outputs with blocks of one type. ``data`` uint8 [outputs, blocks, bytes of a block]."""

    kind: Kind
    data: Tensor

    @property
    def inputs(self) -> int:
        return self.data.shape[1] * self.kind.block

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.data), self.inputs


@dataclass(frozen=True)
class GgufWeight(QuantizedWeight):
    """A weight of ``pieces``, concatenated along outputs: fused projections may mix types."""

    pieces: tuple[BlockRows, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(len(piece.data) for piece in self.pieces), self.pieces[0].inputs

    @property
    def nbytes(self) -> int:
        return sum(piece.data.nbytes for piece in self.pieces)

    def to(self, device: torch.device) -> Self:
        moved = (BlockRows(piece.kind, piece.data.to(device)) for piece in self.pieces)
        return dataclasses.replace(self, pieces=tuple(moved))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        from gguf import constants, quants

        inputs, device = self.shape[1], self.pieces[0].data.device
        result = torch.empty(self.shape, dtype=dtype, device=device)
        step, begin = max(1, _CHUNK // inputs), 0
        for piece in self.pieces:
            kind = constants.GGMLQuantizationType(piece.kind.number)
            for rows in piece.data.flatten(1).split(step):
                floats = np.asarray(quants.dequantize(rows.cpu().numpy(), kind), np.float32)
                result[begin : begin + len(rows)].copy_(torch.from_numpy(floats))
                begin += len(rows)
        return result

    def part(self, part: Part) -> Self:
        pieces: list[BlockRows] = []
        begin = 0
        for piece in self.pieces:
            if part.dimension == 1:
                block = piece.kind.block
                if part.begin % block or part.end % block:
                    raise PartError(f"inputs {part.begin} to {part.end} cut a block of {block} of {piece.kind.name}")
                data = piece.data[:, part.begin // block : part.end // block]
            else:
                data = piece.data[max(part.begin - begin, 0) : max(part.end - begin, 0)]
                begin += len(piece.data)
            if len(data):
                pieces.append(BlockRows(piece.kind, data.contiguous()))
        return dataclasses.replace(self, pieces=tuple(pieces))

    def join(self, others: Sequence[QuantizedWeight]) -> Self | None:
        pieces: list[BlockRows] = []
        for weight in (self, *others):
            if not isinstance(weight, GgufWeight) or weight.dtype != self.dtype:
                return None
            for piece in weight.pieces:
                if pieces and pieces[-1].kind == piece.kind:
                    pieces[-1] = BlockRows(piece.kind, torch.cat((pieces[-1].data, piece.data)))
                else:
                    pieces.append(piece)
        return dataclasses.replace(self, pieces=tuple(pieces))
