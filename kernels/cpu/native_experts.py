"""A layer's experts for the native operator."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kernels.cpu.native.library import Op
from kernels.cpu.products import AnyWeight, products

__all__ = ["ExpertProduct", "ExpertTable"]


@dataclass(frozen=True)
class ExpertProduct:
    """``clip``: of their largest that tokens are held within first, 0: all; ``settled``: whether they are then rounded,
    as ``settle_tokens`` does. ``gated``: as ``products``."""

    weight: AnyWeight
    bias: Tensor | None
    settled: bool = False
    clip: float = 0.0
    gated: bool = False


class _Expert(ctypes.Structure):
    """``Expert`` of kernels/cpu/native/experts.h."""

    _fields_ = (
        ("up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("ups", ctypes.c_int64),
        ("downs", ctypes.c_int64),
        ("settled_up", ctypes.c_int64),
        ("settled_down", ctypes.c_int64),
        ("clip_up", ctypes.c_double),
        ("clip_down", ctypes.c_double),
    )


class ExpertTable:
    """``experts``: of each the products of its gates and others, and those that lead back. ``address``: of the table,
    which lives as long as this."""

    def __init__(self, experts: Sequence[tuple[ExpertProduct, ExpertProduct]]) -> None:
        self.inner = experts[0][1].weight.inputs
        self._kept: list[object] = []
        self._experts = (_Expert * len(experts))(*(self._expert(up, down) for up, down in experts))
        self.address = ctypes.addressof(self._experts)

    def _expert(self, up: ExpertProduct, down: ExpertProduct) -> _Expert:
        (first, ups), (second, downs) = self._operators(up), self._operators(down)
        return _Expert(first, second, ups, downs, up.settled, down.settled, up.clip, down.clip)

    def _operators(self, product: ExpertProduct) -> tuple[int, int]:
        """Where they are, and how many."""
        found = products(product.weight, product.bias, product.gated)
        ops = (Op * len(found))()
        for place, (op, first, kept) in enumerate(found):
            op.out = first
            ops[place] = op
            self._kept.append(kept)
        self._kept.append(ops)
        return ctypes.addressof(ops), len(found)
