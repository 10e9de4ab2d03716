"""Experts in MXFP4 as gpt-oss stores them (https://huggingface.co/openai/gpt-oss-20b; OCP Microscaling Formats 1.0).

``NAME_blocks`` uint8 [experts, outputs, blocks, 16] holds two e2m1 numbers a byte, the low half first, ``NAME_scales``
uint8 [experts, outputs, blocks] the exponent of each block of 32. The family declares and reads these tensors; no other
weight of such a checkpoint is quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.contract.errors import ConfigError
from kernels.weights.gguf.blocks import Codes, Kind
from kernels.weights.quantization.gguf_weight import BlockRows, GgufWeight
from kernels.weights.quantization.scheme import Files, Scheme, StoredTensor
from kernels.weights.quantization.weights import QuantizedWeight
from kernels.weights.tensors import Role, Tensors, TensorSpec

__all__ = ["Mxfp4", "Mxfp4Weight"]

_BLOCK = 32
_HALVES = (0, 1, 2, 3, 4, 6, 8, 12)  # of e2m1
_MIDDLE = 128  # the exponent's 127, and 1 because values are counted in halves
_CHUNK = 1 << 22  # numbers that are dequantized at a time


def _open(blocks: Tensor) -> Codes:
    exponents, packed = blocks[:, :, 0].to(torch.int32) - _MIDDLE, blocks[:, :, 1:]
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return Codes(codes, torch.ldexp(torch.ones(exponents.shape), exponents).to(torch.float16))


_KIND = Kind("MXFP4", -1, _BLOCK, _BLOCK, 17, 4, (*_HALVES, *(-value for value in _HALVES)), False, (), _open)
"""A block is its exponent and 16 bytes."""


@dataclass(frozen=True)
class Mxfp4Weight(GgufWeight):
    """A weight in MXFP4."""

    @classmethod
    def from_blocks(cls, blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Mxfp4Weight:
        """``blocks`` uint8 [outputs, blocks, 16] and ``scales`` uint8 [outputs, blocks], as stored. ``dtype``: of
        activations."""
        data = torch.cat((scales.unsqueeze(-1), blocks), -1).contiguous()
        return cls(dtype=dtype, pieces=(BlockRows(_KIND, data),))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        result = torch.empty(self.shape, dtype=dtype, device=self.pieces[0].data.device)
        values, begin = torch.tensor(_KIND.values, dtype=torch.float32, device=result.device), 0
        for piece in self.pieces:
            for rows in piece.data.split(max(1, _CHUNK // piece.inputs)):
                packed = rows[:, :, 1:]
                codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).to(torch.int64)
                exponents = rows[:, :, :1].to(torch.int32) - _MIDDLE
                result[begin : begin + len(rows)].copy_(torch.ldexp(values[codes], exponents).flatten(1))
                begin += len(rows)
        return result


class Mxfp4(Scheme):
    """``settings``: quantization_config."""

    name = "mxfp4"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        del settings

    def adapt(self, tensors: Tensors) -> Tensors:
        if not any(spec.role is Role.NIBBLES for spec in tensors.values()):
            raise ConfigError("quantization_config: quant_method mxfp4 is read for gpt-oss alone; use bf16")
        return tensors

    def tensors(self, weight: TensorSpec) -> dict[str, StoredTensor] | None:
        return None

    def read(self, files: Files, weight: TensorSpec) -> QuantizedWeight:
        raise AssertionError("the family reads what is stored quantized")
