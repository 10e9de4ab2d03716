"""Layers of experts on the CPU: one native operator, where there are native products with all weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from kernels.contract.errors import UnsupportedError
from kernels.core.operators import Linear
from kernels.devices.cpu.dense_linear import CpuLinear
from kernels.devices.cpu.linear import CpuLinearLayers
from kernels.devices.cpu.native_experts import ExpertProduct, ExpertTable, NativeChoice
from kernels.devices.cpu.native_int8 import NativeInt8
from kernels.devices.cpu.native_operators import NativeOperators
from kernels.devices.cpu.operators import Native, NativeWeight
from kernels.devices.cpu.quantized import CpuBlocksLinear, CpuGroupedLinear, CpuInt8Linear
from kernels.devices.cpu.recording import NotNative
from kernels.devices.experts import (
    ClampedGate,
    ExpertLayers,
    Experts,
    ExpertsInTurn,
    ExpertWeights,
    Routing,
    choose_places,
)
from kernels.devices.fallbacks import Fallbacks
from kernels.devices.linear import ClippedLinear, ConcatenatedLinear, FakeQuantizedLinear

__all__ = ["CpuExpertLayers", "CpuExperts"]

_NATIVE = (CpuLinear, CpuInt8Linear, CpuGroupedLinear, CpuBlocksLinear)
_BATCH_INVARIANT = (NativeWeight, NativeInt8)
"""Weights with which any number of rows is multiplied in one way, however many of them an expert has."""


class CpuExperts:
    """[tokens, hidden] -> [tokens, hidden]. ``linears``: (gate and up, down) of each expert, as linear layers;
    ``gate``: of each, in place of SwiGLU's. ``choice``: the native router and choice, where they are not plain.
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
        choice: NativeChoice | None = None,
    ) -> None:
        self._gate, self._count, self._choice = gate, count, choice
        self.in_turn = in_turn
        self._linears = tuple(linears)
        self._native = native
        self._fallbacks = fallbacks
        self._table: ExpertTable | None = None
        self._sought: Native | None = None  # for which there is a table, or none

    def __call__(self, x: Tensor) -> Tensor:
        """Raises NotNative while operators are recorded, if there is none for this layer."""
        native, layer = self._fitting(x), self.in_turn
        if native is None or self._table is None:
            return layer(x)
        routing = layer.routing
        if routing.is_plain or self._choice is not None:
            return native.experts(x, layer.router(x) if self._choice is None else self._choice, self._table, routing)
        self._native.refuse("this choice of experts")
        return native.experts_chosen(x, *choose_places(layer.router(x), routing), self._table)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.in_turn.route(x)

    def run_places(self, x: Tensor, weights: Tensor, places: Tensor) -> Tensor:
        native = self._fitting(x)
        if native is None or self._table is None:
            return self.in_turn.run_places(x, weights, places)
        self._native.refuse("experts of other ranks")
        return native.experts_chosen(x, weights, places, self._table)

    def _fitting(self, x: Tensor) -> Native | None:
        """The operators that can run the layer; None: there are none, for ``x`` or at all. Raises NotNative while
        operators are recorded."""
        native = self._native.current
        fits = native is not None and Native.fits_experts(x)
        if fits and self._sought is not native:
            self._sought, self._table = native, self._tabled()
        if native is not None and fits and self._table is not None:
            return native
        if native is not None and native.recording:
            raise NotNative("a layer of experts")
        self._fallbacks.log("experts are run one by one by torch's operators: decodes are no program")
        return None

    def choose(self, x: Tensor) -> Tensor:
        return self.in_turn.choose(x)

    def weights(self, number: int) -> list[Tensor]:
        return [weight for linear in self._linears[number] for weight in _weights(linear)]

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
        dispatch = self.in_turn.routing.dispatch
        return ExpertTable(result, gate, local.start, self._count if dispatch is None else dispatch.places)


def _weights(linear: Linear) -> list[Tensor]:
    """What ``Experts.weights`` has of a linear layer."""
    if isinstance(linear, FakeQuantizedLinear):
        return _weights(linear.linear)
    if isinstance(linear, ConcatenatedLinear):
        return [weight for piece in linear.pieces for weight in _weights(piece)]
    if isinstance(linear, _NATIVE):
        return linear.weights()
    is_clipped = isinstance(linear, ClippedLinear)
    raise UnsupportedError("their activations are clipped" if is_clipped else "no kernel supports them")


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
        choice = None
        if NativeChoice.fits(routing):
            router = router.float()  # which the layer in turn shares
            choice = NativeChoice(router, bias, routing)
        in_turn = ExpertsInTurn(
            self.make_router(router, bias, routing),
            [(self._gated(up, gate), down) for up, down in linears],
            routing,
        )
        return CpuExperts(in_turn, linears, self._native, self.fallbacks, router.shape[0], gate, choice)

    def _gated(self, up: Linear, gate: ClampedGate | None) -> Linear:
        return self._linear.gate(up) if gate is None else lambda x: gate(up(x))
