"""A layer's experts for the native operator."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kernels.devices.cpu.matmul import AnyWeight, products
from kernels.devices.cpu.native.library import Op

__all__ = ["ExpertProduct", "ExpertTable"]


@dataclass(frozen=True)
class ExpertProduct:
    """A product that gives the outputs from ``first`` on. ``clip``: of their largest that tokens are held within first,
    0: all; ``fake_quantized``: whether they are then rounded, as ``fake_quantize_tokens`` does. ``gated``: as
    ``products``.
    """

    weight: AnyWeight
    bias: Tensor | None
    fake_quantized: bool = False
    clip: float = 0.0
    gated: bool = False
    first: int = 0


class _Expert(ctypes.Structure):
    """``Expert`` of kernels/devices/cpu/native/experts.h."""

    _fields_ = (
        ("up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("ups", ctypes.c_int64),
        ("downs", ctypes.c_int64),
        ("fake_quantized_up", ctypes.c_int64),
        ("fake_quantized_down", ctypes.c_int64),
        ("clip_up", ctypes.c_double),
        ("clip_down", ctypes.c_double),
    )


class ExpertTable:
    """``experts``: of each the products of its gates and others, and those that lead back, side by side; they are
    those from ``first`` on, and the rest of ``count`` is absent (0: there are no more). ``gate``: factor and limit of
    clamped gates. ``address``: of the table, which lives as long as this."""

    def __init__(
        self,
        experts: Sequence[tuple[Sequence[ExpertProduct], Sequence[ExpertProduct]]],
        gate: tuple[float, float] | None = None,
        first: int = 0,
        count: int = 0,
    ) -> None:
        self.gate = None if gate is None else (ctypes.c_float * 2)(*gate)
        self.count = count or len(experts)
        self.inner = experts[0][1][0].weight.inputs
        self._kept: list[object] = []
        self._experts = (_Expert * self.count)()  # absent ones have no products
        for number, (up, down) in enumerate(experts, first):
            self._experts[number] = self._expert(up, down)
        self.address = ctypes.addressof(self._experts)

    def _expert(self, ups: Sequence[ExpertProduct], downs: Sequence[ExpertProduct]) -> _Expert:
        (first, count), (second, others) = self._operators(ups), self._operators(downs)
        up, down = ups[0], downs[0]
        return _Expert(first, second, count, others, up.fake_quantized, down.fake_quantized, up.clip, down.clip)

    def _operators(self, side_by_side: Sequence[ExpertProduct]) -> tuple[int, int]:
        """Where they are, and how many."""
        result: list[Op] = []
        for product in side_by_side:
            for op, first, kept in products(product.weight, product.bias, product.gated):
                op.out = product.first + first
                result.append(op)
                self._kept.append(kept)
        ops = (Op * len(result))(*result)
        self._kept.append(ops)
        return ctypes.addressof(ops), len(result)
