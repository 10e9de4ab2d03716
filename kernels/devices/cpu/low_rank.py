"""What adapters add to a linear layer on the CPU, whose Python reads which rows have which adapter."""

from __future__ import annotations

from torch import Tensor

from kernels.devices.low_rank import LowRankDelta

__all__ = ["SegmentedDelta"]


class SegmentedDelta(LowRankDelta):
    """``LowRankDelta`` by products of the rows of each adapter, which read its matrices once, and no others."""

    def __call__(self, x: Tensor, outputs: Tensor) -> Tensor:
        """``x`` [rows, inputs], ``outputs`` [rows, outputs], which is overwritten and returned."""
        for place, rows in self.context.segments:
            low = (x if rows is None else x.index_select(0, rows)) @ self.down[place].T
            for index, (begin, end) in enumerate(self.columns):
                more = low[:, index * self.rank : (index + 1) * self.rank] @ self.up[place, :, begin:end]
                if rows is None:
                    outputs[:, begin:end] += more
                else:
                    outputs[:, begin:end].index_add_(0, rows, more)
        return outputs
