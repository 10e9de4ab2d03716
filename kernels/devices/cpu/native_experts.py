"""A layer's experts for the native operator."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kernels.devices.cpu.matmul import AnyWeight, products
from kernels.devices.cpu.native.library import Op
from kernels.devices.experts import Routing

__all__ = ["ExpertProduct", "ExpertTable", "NativeChoice"]


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


class _Choice(ctypes.Structure):
    """``Choice`` of kernels/devices/cpu/native/experts.h."""

    _fields_ = (
        ("bias", ctypes.c_void_p),
        ("correction", ctypes.c_void_p),
        ("is_sigmoid", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("top_groups", ctypes.c_int64),
        ("is_pair_sum", ctypes.c_int64),
        ("scale", ctypes.c_double),
    )


class NativeChoice:
    """A router in float32 with a choice that is more than a softmax, for the native operator.

    ``router`` float32 [experts, hidden]; ``bias`` [experts]. ``address``: of the choice, which lives as long as this.
    """

    def __init__(self, router: Tensor, bias: Tensor | None, routing: Routing) -> None:
        self.router = router.contiguous()
        correction = routing.correction
        self._bias = None if bias is None else bias.float().contiguous()
        self._correction = None if correction is None else correction.float().contiguous()
        self._choice = _Choice(
            None if self._bias is None else self._bias.data_ptr(),
            None if self._correction is None else self._correction.data_ptr(),
            routing.scores == "sigmoid",
            routing.groups,
            routing.top_groups,
            routing.pair_sum,
            routing.scale,
        )
        self.address = ctypes.addressof(self._choice)

    @staticmethod
    def fits(routing: Routing) -> bool:
        return not (routing.is_plain or routing.in_torch or routing.on_inputs)


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
