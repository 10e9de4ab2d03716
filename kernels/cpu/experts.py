"""Layers of experts on the CPU: one native operator, where there are native products with all weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch import Tensor

from kernels.cpu.linear import CpuLinear
from kernels.cpu.native_experts import ExpertProduct, ExpertTable
from kernels.cpu.operators import Native
from kernels.cpu.quantized import CpuBlocksLinear, CpuGroupedLinear, CpuInt8Linear
from kernels.cpu.recording import NotNative
from kernels.layers.experts import ExpertsInTurn
from kernels.platforms.operators import Linear
from kernels.platforms.projections import Clipped, Settled, SideBySide

__all__ = ["CpuExperts"]

_NATIVE = (CpuLinear, CpuInt8Linear, CpuGroupedLinear, CpuBlocksLinear)


class CpuExperts:
    """[tokens, hidden] -> [tokens, hidden]. ``linears``: (gate and up, down) of each expert, as linear layers;
    ``in_turn``: the same layer, experts one by one. ``native``: the operators, once they are there. ``tell``: called
    once when only ``in_turn`` can run it.
    """

    def __init__(
        self,
        in_turn: ExpertsInTurn,
        linears: Sequence[tuple[Linear, Linear]],
        native: Callable[[], Native | None],
        tell: Callable[[], None],
    ) -> None:
        self.in_turn = in_turn
        self._linears = tuple(linears)
        self._native = native
        self._tell = tell
        self._table: ExpertTable | None = None
        self._sought: Native | None = None  # for which there is a table, or none
        self._told = False

    def __call__(self, x: Tensor) -> Tensor:
        """Raises NotNative while operators are recorded, if there is none for this layer."""
        native, layer = self._native(), self.in_turn
        fits = native is not None and Native.fits_experts(x)
        if fits and self._sought is not native:
            self._sought, self._table = native, self._tabled()
        if native is not None and fits and self._table is not None:
            return native.experts(x, layer.router(x), self._table, layer.chosen, layer.normalized)
        if native is not None and native.recording:
            raise NotNative("a layer of experts")
        if not self._told:
            self._told = True
            self._tell()
        return layer(x)

    def _tabled(self) -> ExpertTable | None:
        found: list[tuple[list[ExpertProduct], list[ExpertProduct]]] = []
        for up, down in self._linears:
            first, second = _products(up, True), _products(down, False)
            if first is None or second is None:
                return None
            found.append((first, second))
        return ExpertTable(found)


def _products(linear: Linear, gated: bool) -> list[ExpertProduct] | None:
    """Side by side; None: there are none for all of it."""
    if not isinstance(linear, SideBySide):
        alone = _product(linear, gated)
        return None if alone is None else [alone]
    found: list[ExpertProduct] = []
    for first, piece in zip(linear.firsts, linear.pieces, strict=True):
        product = _product(piece, False)
        if product is None or (found and (product.settled, product.clip) != (found[0].settled, found[0].clip)):
            return None
        found.append(dataclasses.replace(product, first=first))
    return found


def _product(linear: Linear, gated: bool) -> ExpertProduct | None:
    if isinstance(linear, Settled):
        found = _product(linear.linear, gated)
        return None if found is None else dataclasses.replace(found, settled=True)
    if isinstance(linear, Clipped):
        found = _product(linear.linear, gated)
        return None if found is None else dataclasses.replace(found, clip=float(linear.share.bfloat16()))
    return linear.product(gated) if isinstance(linear, _NATIVE) else None
