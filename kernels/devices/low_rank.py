"""What adapters add to a linear layer, in plain torch.

The matrices of all resident adapters lie one behind the other in ``places``; place 0 is of none and holds zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.core.layer_context import LayerContext

__all__ = ["LowRankDelta"]


class LowRankDelta:
    """Adds ``x @ down[p].T @ up[p]`` to the outputs of each row, where p is the row's place.

    down [places, modules * rank, inputs]: of the layer's fused modules one after the other. up: of each module
    [places, rank, outputs].
    """

    def __init__(self, context: LayerContext, down: Tensor, up: Sequence[Tensor]) -> None:
        self.context, self.down, self.up = context, down, tuple(up)
        self.rank = self.up[0].shape[1]
        ends = torch.tensor([part.shape[2] for part in up]).cumsum(0).tolist()
        self.columns = tuple(zip((0, *ends[:-1]), ends, strict=True))
        self._numbers = torch.arange(1, len(down), device=down.device)

    def __call__(self, x: Tensor, outputs: Tensor) -> Tensor:
        """``x`` [rows, inputs], ``outputs`` [rows, outputs], which is overwritten and returned."""
        # A row's own matrices are read for few rows; for many, all places' are multiplied and the others' masked.
        return self._few(x, outputs) if len(x) < len(self.down) else self._many(x, outputs)

    def _few(self, x: Tensor, outputs: Tensor) -> Tensor:
        places = self.context.rows
        low = torch.bmm(self.down.index_select(0, places), x.unsqueeze(2)).squeeze(2)
        for index, (up, (begin, end)) in enumerate(zip(self.up, self.columns, strict=True)):
            own = low[:, index * self.rank : (index + 1) * self.rank].unsqueeze(1)
            outputs[:, begin:end] += torch.bmm(own, up.index_select(0, places)).squeeze(1)
        return outputs

    def _many(self, x: Tensor, outputs: Tensor) -> Tensor:
        low = torch.matmul(x, self.down[1:].flatten(0, 1).T).view(len(x), len(self._numbers), -1)
        low.masked_fill_((self.context.rows[:, None] != self._numbers).unsqueeze(2), 0)
        for index, (up, (begin, end)) in enumerate(zip(self.up, self.columns, strict=True)):
            own = low[:, :, index * self.rank : (index + 1) * self.rank].flatten(1)
            outputs[:, begin:end] += torch.matmul(own, up[1:].flatten(0, 1))
        return outputs
