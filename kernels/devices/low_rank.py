"""What adapters add to a linear layer, in plain torch.

The matrices of all resident adapters lie one behind the other in ``places``; place 0 is of none and holds zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from kernels.core.layer_context import Delta, LayerContext

__all__ = ["LookupDelta", "LowRankDelta", "ScaledDelta"]


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


class ScaledDelta:
    """``delta``, and each row's outputs without the layer's bias times ``1 + scales[p]`` (DoRA); p is the row's place.

    scales float32 [places, outputs]: 0 where nothing is scaled. bias [outputs]: the layer's.
    """

    def __init__(self, delta: Delta, context: LayerContext, scales: Tensor, bias: Tensor | None) -> None:
        self.delta, self.context, self.scales, self.bias = delta, context, scales, bias

    def __call__(self, x: Tensor, outputs: Tensor) -> Tensor:
        """``x`` [rows, inputs], ``outputs`` [rows, outputs], which may be overwritten."""
        result = self.delta(x, outputs)
        factors = self.scales.index_select(0, self.context.rows)
        own = result if self.bias is None else result - self.bias
        return result.add_((own * factors).to(result.dtype))


class LookupDelta:
    """Adds ``down[p, id] @ up[p]`` to the embedding of each row's token id; p is the row's place.

    down [places, vocab, rank], up [places, rank, hidden].
    """

    def __init__(self, context: LayerContext, down: Tensor, up: Tensor) -> None:
        self.context, self.down, self.up = context, down, up
        self._numbers = torch.arange(1, len(down), device=down.device)

    def __call__(self, ids: Tensor, outputs: Tensor) -> Tensor:
        """``ids`` int [rows], ``outputs`` [rows, hidden], which is overwritten and returned."""
        places = self.context.rows
        low = self.down.flatten(0, 1).index_select(0, places * self.down.shape[1] + ids)
        own = low.unsqueeze(1) * (places[:, None] == self._numbers).unsqueeze(2)  # 0 for the other places
        return outputs.addmm_(own.flatten(1), self.up[1:].flatten(0, 1))
