"""Matrix products in tiles of one fixed size.

A library chooses its kernel, and so the order of its sums, by the shape of a product. Here every product of a weight
has the same shape: rows are filled up with zeros to whole tiles, and each tile is one call. Whether a row's place in
its tile and the other rows of the tile change its bits is tried when the product is made, on numbers whose sums depend
on their order. Where they do, each row is a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from kernels.core.operators import Linear

__all__ = ["TILE", "TiledLinear", "rows_alike"]

TILE: Final = 16
"""Rows of a tile."""
_ALIGNMENT: Final = 64
"""Bytes: a library may choose its kernel by the address of its input, too."""


def rows_alike(call: Callable[[Tensor], Tensor], shape: tuple[int, ...], like: Tensor) -> bool:
    """Whether ``call`` of [..., rows, inputs] -> [..., rows, outputs] gives a row the same bits at each place among any
    others. ``like``: a tensor of the input's dtype and device."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.randint(-4, 5, shape, generator=generator).float().exp2()
    x = (torch.randn(shape, generator=generator) * scales).to(like.device, like.dtype)
    whole, rows = call(x), shape[-2]
    for shift in {1, rows // 2, rows - 1}:
        if not torch.equal(call(x.roll(shift, -2)).roll(-shift, -2), whole):
            return False
    for row in (0, rows - 1):
        alone = torch.zeros_like(x)
        alone[..., row, :] = x[..., row, :]
        if not torch.equal(call(alone)[..., row, :], whole[..., row, :]):
            return False
    return True


class TiledLinear:
    """``multiply`` [tokens, inputs] -> [tokens, outputs], whose result for a token depends on this token alone.

    ``like``: a tensor of the input's dtype and device. ``tile``: rows of each call.
    """

    def __init__(self, multiply: Linear, inputs: int, like: Tensor) -> None:
        self._multiply = multiply
        self._inputs = inputs
        self.tile = TILE if rows_alike(multiply, (TILE, inputs), like) else 1

    def __call__(self, x: Tensor) -> Tensor:
        tokens, tile = len(x), self.tile
        rows = max(1, -(-tokens // tile)) * tile
        bytes_ = tile * self._inputs * x.element_size()
        if rows != tokens or not x.is_contiguous() or x.data_ptr() % _ALIGNMENT:
            held = x.new_zeros((rows, self._inputs))
            held[:tokens] = x
            x = held
        if rows == tile:
            return self._multiply(x)[:tokens]
        parts = x.split(tile)
        result = [self._multiply(part if bytes_ % _ALIGNMENT == 0 else part.clone()) for part in parts]
        return torch.cat(result)[:tokens]
