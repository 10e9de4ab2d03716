"""Layers of experts on the CPU: one native operator, where there are native products with all weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from kernels.core.operators import Linear
from kernels.devices.cpu.dense_linear import CpuLinear
from kernels.devices.cpu.linear import CpuLinearLayers
from kernels.devices.cpu.native_experts import ExpertProduct, ExpertTable
from kernels.devices.cpu.native_int8 import NativeInt8
from kernels.devices.cpu.native_operators import NativeOperators
from kernels.devices.cpu.operators import Native, NativeWeight
from kernels.devices.cpu.quantized import CpuBlocksLinear, CpuGroupedLinear, CpuInt8Linear
from kernels.devices.cpu.recording import NotNative
from kernels.devices.experts import ClampedGate, ExpertLayers, Experts, ExpertsInTurn, ExpertWeights, Routing, choose
from kernels.devices.fallbacks import Fallbacks
from kernels.devices.linear import ClippedLinear, ConcatenatedLinear, FakeQuantizedLinear

__all__ = ["CpuExpertLayers", "CpuExperts"]

_NATIVE = (CpuLinear, CpuInt8Linear, CpuGroupedLinear, CpuBlocksLinear)
_BATCH_INVARIANT = (NativeWeight, NativeInt8)
"""Weights with which any number of rows is multiplied in one way, however many of them an expert has."""


class CpuExperts:
    """[tokens, hidden] -> [tokens, hidden]. ``linears``: (gate and up, down) of each expert, as linear layers;
    ``gate``: of each, in place of SwiGLU's.
    ``count``: experts that the router knows.
    ``in_turn``: the same layer, one expert after the other; the log says once when only that can run it.
    """

    def __init__(
        self,
        in_turn: ExpertsInTurn,
        linears: Sequence[tuple[Linear, Linear]],
        native: NativeOperators,
        fallbacks: Fallbacks,
        count: int,
        gate: ClampedGate | None = None,
    ) -> None:
        self._gate, self._count = gate, count
        self.in_turn = in_turn
        self._linears = tuple(linears)
        self._native = native
        self._fallbacks = fallbacks
        self._table: ExpertTable | None = None
        self._sought: Native | None = None  # for which there is a table, or none

    def __call__(self, x: Tensor) -> Tensor:
        """Raises NotNative while operators are recorded, if there is none for this layer."""
        native, layer = self._native.current, self.in_turn
        fits = native is not None and Native.fits_experts(x)
        if fits and self._sought is not native:
            self._sought, self._table = native, self._tabled()
        if native is not None and fits and self._table is not None:
            routing = layer.routing
            if routing.is_plain:
                return native.experts(x, layer.router(x), self._table, routing.chosen, routing.normalized)
            self._native.refuse("this choice of experts")
            return native.experts_chosen(x, *choose(layer.router(x), routing), self._table)
        if native is not None and native.recording:
            raise NotNative("a layer of experts")
        self._fallbacks.log("experts are run one by one by torch's operators: decodes are no program")
        return layer(x)

    def choose(self, x: Tensor) -> Tensor:
        return self.in_turn.choose(x)

    def _tabled(self) -> ExpertTable | None:
        result: list[tuple[list[ExpertProduct], list[ExpertProduct]]] = []
        for up, down in self._linears:
            first, second = _products(up, self._gate is None), _products(down, False)
            if first is None or second is None:
                return None
            if self._native.batch_invariant and not all(
                isinstance(one.weight, _BATCH_INVARIANT) for one in (*first, *second)
            ):
                return None
            result.append((first, second))
        local = self.in_turn.routing.local or range(len(result))
        gate = None if self._gate is None else (self._gate.alpha, self._gate.limit)
        return ExpertTable(result, gate, local.start, self._count)


def _products(linear: Linear, gated: bool) -> list[ExpertProduct] | None:
    """Side by side; None: there are none for all of it."""
    if not isinstance(linear, ConcatenatedLinear):
        alone = _product(linear, gated)
        return None if alone is None else [alone]
    result: list[ExpertProduct] = []
    for first, piece in zip(linear.firsts, linear.pieces, strict=True):
        product = _product(piece, False)
        if product is None or (
            result and (product.fake_quantized, product.clip) != (result[0].fake_quantized, result[0].clip)
        ):
            return None
        result.append(dataclasses.replace(product, first=first))
    return result


def _product(linear: Linear, gated: bool) -> ExpertProduct | None:
    if isinstance(linear, FakeQuantizedLinear):
        result = _product(linear.linear, gated)
        return None if result is None else dataclasses.replace(result, fake_quantized=True)
    if isinstance(linear, ClippedLinear):
        result = _product(linear.linear, gated)
        return None if result is None else dataclasses.replace(result, clip=float(linear.share.bfloat16()))
    return linear.product(gated) if isinstance(linear, _NATIVE) else None


class CpuExpertLayers(ExpertLayers):
    def __init__(self, linear: CpuLinearLayers, fallbacks: Fallbacks, native: NativeOperators) -> None:
        super().__init__(linear, fallbacks)
        self._linear = linear
        self._native = native

    def make(
        self,
        router: Tensor,
        bias: Tensor | None,
        experts: Sequence[ExpertWeights],
        routing: Routing,
        gate: ClampedGate | None = None,
    ) -> Experts:
        linears = [
            (
                self._linear.make_projection(expert.gate_up, expert.gate_up_bias),
                self._linear.make_projection(expert.down, expert.down_bias),
            )
            for expert in experts
        ]
        in_turn = ExpertsInTurn(
            self.make_router(router, bias, routing),
            [(self._gated(up, gate), down) for up, down in linears],
            routing,
        )
        return CpuExperts(in_turn, linears, self._native, self.fallbacks, router.shape[0], gate)

    def _gated(self, up: Linear, gate: ClampedGate | None) -> Linear:
        return self._linear.gate(up) if gate is None else lambda x: gate(up(x))
