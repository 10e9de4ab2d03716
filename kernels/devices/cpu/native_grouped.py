"""Whole weights of which groups share a scale, for the native products."""

from __future__ import annotations

import torch

from kernels.devices.cpu.large_pages import empty_large
from kernels.devices.cpu.native.library import Library
from kernels.weights.quantization.weights import GroupedWeight

__all__ = ["NativeGrouped"]

_DEPTH = 32  # inputs of a tile's row


class NativeGrouped:
    """A weight of groups in the layout of kernels/devices/cpu/native/gemm_grouped.h, its scales and zeros behind it.

    ``order`` int64 [inputs]: of the inputs; None: as they come. ``zeroed``: whether zeros are others than the middle.
    """

    def __init__(self, library: Library, weight: GroupedWeight) -> None:
        self.outputs, self.inputs = weight.shape
        self.group, self.bits = weight.group, weight.bits
        self.zeroed = weight.zeros is not None
        self.order = None if weight.order is None else weight.order.contiguous()
        sizes = self.outputs, self.inputs, self.group, int(self.bits)
        self.memory = empty_large(library.packed_grouped(*sizes), torch.uint8)
        values, scales = weight.unpacked().contiguous(), weight.scales.float().contiguous()
        zeros = None if weight.zeros is None else weight.zeros.contiguous()
        library.pack_grouped(
            values.data_ptr(),
            scales.data_ptr(),
            None if zeros is None else zeros.data_ptr(),
            *sizes,
            self.memory.data_ptr(),
        )

    @staticmethod
    def fits(weight: GroupedWeight) -> bool:
        """Whether there are native products with it."""
        return weight.activation is None and weight.group % _DEPTH == 0 and weight.dtype == torch.bfloat16
