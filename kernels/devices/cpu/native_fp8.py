"""Weights of e4m3 for the native products."""

from __future__ import annotations

import math

import torch

from kernels.devices.cpu.large_pages import empty_large
from kernels.devices.cpu.native.library import Library
from kernels.weights.quantization.weights import Fp8Weight

__all__ = ["NativeFp8"]

_DEPTH = 32  # inputs of a tile's row
_NAN = 0x7F


class NativeFp8:
    """A weight of e4m3 in the layout of kernels/devices/cpu/native/gemm_fp8.h, its scales behind it. Inputs are not
    rounded.

    ``group``: inputs of an output that share a scale.
    """

    def __init__(self, library: Library, weight: Fp8Weight) -> None:
        self.outputs, self.inputs = weight.shape
        self.group = _group(weight)
        sizes = self.outputs, self.inputs, self.group
        self.memory = empty_large(library.packed_fp8(*sizes), torch.uint8)
        scales = weight.scales.float()
        if weight.block is None:
            scales = scales[:, None]
        else:
            high, wide = weight.block
            scales = scales.repeat_interleave(high, 0)[: self.outputs]
            scales = scales.repeat_interleave(wide // self.group, 1)[:, : self.inputs // self.group]
        values, scales = weight.values.view(torch.uint8).contiguous(), scales.contiguous()
        library.pack_fp8(values.data_ptr(), scales.data_ptr(), *sizes, self.memory.data_ptr())

    @staticmethod
    def fits(weight: Fp8Weight) -> bool:
        """Whether there are native products with it: all numbers of it are some."""
        if weight.dtype != torch.bfloat16 or _group(weight) % _DEPTH:
            return False
        return not bool(((weight.values.view(torch.uint8) & _NAN) == _NAN).any())


def _group(weight: Fp8Weight) -> int:
    inputs = weight.shape[1]
    return inputs if weight.block is None else math.gcd(weight.block[1], inputs)
