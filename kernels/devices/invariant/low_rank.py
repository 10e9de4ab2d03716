"""What adapters add to a linear layer, for each row by its own numbers alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.core.layer_context import LayerContext
from kernels.core.operators import Linear
from kernels.devices.invariant.matmul import TiledLinear
from kernels.devices.linear import TorchLinear
from kernels.devices.low_rank import LookupDelta, LowRankDelta

__all__ = ["InvariantDelta", "InvariantLookupDelta"]


def _tiled(weight: Tensor) -> Linear:
    return TiledLinear(TorchLinear(weight, None), weight.shape[1], weight)


class InvariantDelta(LowRankDelta):
    """``LowRankDelta`` by products of the rows of each adapter, whose sums do not depend on how many rows there are.

    It reads on the host which rows have which adapter. ``make``: of a weight [outputs, inputs], whose values change
    later, a product with that property.
    """

    def __init__(
        self,
        context: LayerContext,
        down: Tensor,
        up: Tensor,
        sizes: Sequence[int],
        make: Callable[[Tensor], Linear] = _tiled,
    ) -> None:
        super().__init__(context, down, up, sizes)
        # A product may be tried when it is made: on places full of zeros every order of a sum is the same.
        generator = torch.Generator(down.device).manual_seed(0)
        down.normal_(generator=generator)
        up.normal_(generator=generator)
        self._down = [make(weight) for weight in down]
        self._up = [[make(weight[:, begin:end].T) for begin, end in self.columns] for weight in up]
        down.zero_()
        up.zero_()

    def __call__(self, x: Tensor, outputs: Tensor) -> Tensor:
        """``x`` [rows, inputs], ``outputs`` [rows, outputs], which is overwritten and returned."""
        for place, rows in self.context.segments:
            low = self._down[place](x if rows is None else x.index_select(0, rows))
            for index, (begin, end) in enumerate(self.columns):
                more = self._up[place][index](low[:, index * self.rank : (index + 1) * self.rank])
                if rows is None:
                    outputs[:, begin:end] += more
                else:
                    outputs[:, begin:end].index_add_(0, rows, more.to(outputs.dtype))
        return outputs


class InvariantLookupDelta(LookupDelta):
    """``LookupDelta`` as sums of rows of ``up``, one after the other."""

    def __call__(self, ids: Tensor, outputs: Tensor) -> Tensor:
        """``ids`` int [rows], ``outputs`` [rows, hidden], which is overwritten and returned."""
        places = self.context.rows
        low = self.down.flatten(0, 1).index_select(0, places * self.down.shape[1] + ids)
        for index in range(low.shape[1]):
            outputs.addcmul_(low[:, index : index + 1], self.up[:, index].index_select(0, places))
        return outputs
