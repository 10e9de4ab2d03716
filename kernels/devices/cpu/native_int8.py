"""Weights of whole numbers for the native products."""

from __future__ import annotations

import torch

from kernels.devices.cpu.large_pages import empty_large
from kernels.devices.cpu.native.library import Library
from kernels.weights.quantization.weights import Int8Weight, StaticActivation

__all__ = ["NativeInt8"]

_DEPTH = 64  # inputs of a tile's row


class NativeInt8:
    """An int8 weight in the layout of kernels/devices/cpu/native/gemm_int8.h, its scales and correction behind it.

    ``scale``: of every token, 0: each has its own; ``offset``: that is added to a token's whole numbers.
    """

    def __init__(self, library: Library, weight: Int8Weight) -> None:
        self.outputs, self.inputs = weight.shape
        self.memory = empty_large(library.packed8(self.outputs, self.inputs), torch.int8)
        self.scale, self.offset = 0.0, 0
        if isinstance(weight.activation, StaticActivation):
            self.scale = float(weight.activation.scale)
            self.offset = 0 if weight.activation.offset is None else int(weight.activation.offset)
        values, scales, correction = weight.values.contiguous(), weight.scales.contiguous(), weight.correction
        library.pack8(
            values.data_ptr(),
            scales.data_ptr(),
            None if correction is None else correction.data_ptr(),
            self.outputs,
            self.inputs,
            self.memory.data_ptr(),
        )

    @staticmethod
    def fits(weight: Int8Weight) -> bool:
        """Whether there are native products with it."""
        return weight.activation is not None and weight.shape[1] % _DEPTH == 0 and weight.dtype == torch.bfloat16
