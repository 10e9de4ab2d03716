"""What adapters add to a linear layer, in plain torch.

The matrices of all resident adapters lie one behind the other in ``places``; place 0 is of none and holds zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from kernels.core.layer_context import LayerContext

__all__ = ["LowRankDelta"]


class LowRankDelta:
    """Adds ``x @ down[p].T @ up[p]`` to the outputs of each row, for each of the layer's fused modules; p is the row's
    place.

    down [places, modules * rank, inputs], up [places, rank, outputs]: of the modules one after the other, which have
    ``sizes`` outputs.
    """

    def __init__(self, context: LayerContext, down: Tensor, up: Tensor, sizes: Sequence[int]) -> None:
        self.context, self.down, self.up, self.rank = context, down, up, up.shape[1]
        self.columns = tuple(pairwise(accumulate(sizes, initial=0)))
        self._numbers = torch.arange(1, len(down), device=down.device)

    def __call__(self, x: Tensor, outputs: Tensor) -> Tensor:
        """``x`` [rows, inputs], ``outputs`` [rows, outputs], which is overwritten and returned."""
        # A row's own matrices are read for few rows; for many, all places' are multiplied and the others' masked.
        return self._few(x, outputs) if len(x) < len(self.down) else self._many(x, outputs)

    def _few(self, x: Tensor, outputs: Tensor) -> Tensor:
        places = self.context.rows
        low = torch.bmm(self.down.index_select(0, places), x.unsqueeze(2)).squeeze(2)
        up = self.up.index_select(0, places)
        for index, (begin, end) in enumerate(self.columns):
            own = low[:, index * self.rank : (index + 1) * self.rank].unsqueeze(1)
            outputs[:, begin:end] += torch.bmm(own, up[:, :, begin:end]).squeeze(1)
        return outputs

    def _many(self, x: Tensor, outputs: Tensor) -> Tensor:
        low = torch.matmul(x, self.down[1:].flatten(0, 1).T).view(len(x), len(self._numbers), -1)
        low.masked_fill_((self.context.rows[:, None] != self._numbers).unsqueeze(2), 0)
        up = self.up[1:].flatten(0, 1)
        for index, (begin, end) in enumerate(self.columns):
            own = low[:, :, index * self.rank : (index + 1) * self.rank].flatten(1)
            outputs[:, begin:end] += torch.matmul(own, up[:, begin:end])
        return outputs
