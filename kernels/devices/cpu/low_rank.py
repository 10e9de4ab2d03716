"""What adapters add to a linear layer on the CPU: by native operators, else by products of each adapter's rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.core.layer_context import LayerContext
from kernels.devices.cpu.native_operators import NativeOperators
from kernels.devices.cpu.operators import LOW_RANK, LowRankPlaces, Native
from kernels.devices.low_rank import LowRankDelta

__all__ = ["CpuLowRankDelta", "is_ordered", "order_down", "order_up"]


class CpuLowRankDelta(LowRankDelta):
    """``LowRankDelta`` that reads the matrices of each adapter once for its rows, and no others."""

    def __init__(
        self, native: NativeOperators, context: LayerContext, down: Tensor, up: Tensor, sizes: Sequence[int]
    ) -> None:
        super().__init__(context, down, up, sizes)
        self._native, self._ordered = native, is_ordered(down, up, sizes)
        self._places = LowRankPlaces(context, down, up, np.cumsum(sizes, dtype=np.int64))

    def __call__(self, x: Tensor, outputs: Tensor) -> Tensor:
        """``x`` [rows, inputs], ``outputs`` [rows, outputs], which is overwritten and returned."""
        fits = self._ordered and outputs.dtype == x.dtype  # logits may be in float32
        native = self._native.fitting(x.dtype, fits)
        if native is None:
            return self._by_segments(x, outputs)
        native.add_low_rank(x, self._places, outputs)
        return outputs

    def _by_segments(self, x: Tensor, outputs: Tensor) -> Tensor:
        for place, rows in self.context.segments:
            down, up = self.down[place], self.up[place]
            if self._ordered:
                down, up = _plain_down(down), _plain_up(up)
            low = (x if rows is None else x.index_select(0, rows)) @ down.T
            for index, (begin, end) in enumerate(self.columns):
                more = low[:, index * self.rank : (index + 1) * self.rank] @ up[:, begin:end]
                if rows is None:
                    outputs[:, begin:end] += more
                else:
                    outputs[:, begin:end].index_add_(0, rows, more.to(outputs.dtype))
        return outputs


def is_ordered(down: Tensor, up: Tensor, sizes: Sequence[int]) -> bool:
    """Whether matrices of such a layer are kept in the order of the operators. ``down`` [.., inputs], ``up`` [.., rank,
    outputs]."""
    return down.dtype == torch.bfloat16 and Native.fits_low_rank(down.shape[-1], up.shape[-2], sizes)


def order_down(down: Tensor) -> Tensor:
    """[columns, inputs] -> the same in the order of LOW_RANK of program.h."""
    columns, inputs = down.shape
    return down.view(columns // LOW_RANK, LOW_RANK, inputs // 2, 2).transpose(1, 2).reshape(columns, inputs)


def order_up(up: Tensor) -> Tensor:
    """[rank, outputs] -> the same in the order of LOW_RANK of program.h."""
    rank, outputs = up.shape
    return up.view(rank // 2, 2, outputs // LOW_RANK, LOW_RANK).permute(2, 0, 3, 1).reshape(rank, outputs)


def _plain_down(ordered: Tensor) -> Tensor:
    columns, inputs = ordered.shape
    return ordered.view(columns // LOW_RANK, inputs // 2, LOW_RANK, 2).transpose(1, 2).reshape(columns, inputs)


def _plain_up(ordered: Tensor) -> Tensor:
    rank, outputs = ordered.shape
    return ordered.view(outputs // LOW_RANK, rank // 2, LOW_RANK, 2).permute(1, 3, 0, 2).reshape(rank, outputs)
