"""Linear layers on the CPU: native products, once they are compiled, else PyTorch's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.contract.cpu_isa import processor_isa
from kernels.core.layer_context import Delta, LayerContext
from kernels.core.operators import Linear, Lookup
from kernels.devices.cpu.dense_linear import CpuLinear, TiedLinear
from kernels.devices.cpu.low_rank import CpuLowRankDelta, is_ordered, order_down, order_up
from kernels.devices.cpu.native.library import NEEDED_ISA
from kernels.devices.cpu.native_blocks import NativeBlocks
from kernels.devices.cpu.native_fp8 import NativeFp8
from kernels.devices.cpu.native_grouped import NativeGrouped
from kernels.devices.cpu.native_int8 import NativeInt8
from kernels.devices.cpu.native_operators import NativeOperators
from kernels.devices.cpu.operators import LOW_RANK, Native
from kernels.devices.cpu.quantized import CpuBlocksLinear, CpuGroupedLinear, CpuInt8Linear
from kernels.devices.elementwise import Elementwise
from kernels.devices.fallbacks import Fallbacks
from kernels.devices.linear import LinearLayers
from kernels.weights.quantization.weights import Fp8Weight, GroupedWeight, Int8Weight, Projection, QuantizedWeight

__all__ = ["CpuLinearLayers", "fits_native"]

_GATED = (CpuLinear, CpuInt8Linear, CpuGroupedLinear, CpuBlocksLinear)
"""Layers that may have products with gates."""


def fits_native(weight: QuantizedWeight) -> bool:
    """Whether there are native products with ``weight``."""
    if isinstance(weight, Int8Weight):
        return NativeInt8.fits(weight) if weight.activation is not None else fits_native(weight.grouped())
    if isinstance(weight, GroupedWeight):
        return NativeGrouped.fits(weight)
    if isinstance(weight, Fp8Weight):
        return NativeFp8.fits(weight)
    return NativeBlocks.fits(weight)


class CpuLinearLayers(LinearLayers):
    def __init__(self, elementwise: Elementwise, fallbacks: Fallbacks, native: NativeOperators) -> None:
        super().__init__(elementwise, fallbacks)
        self._native = native

    def make_dense(self, weight: Tensor, bias: Tensor | None, shared: bool = False) -> Linear:
        linear = CpuLinear(weight, bias, shared, self._native.current)
        self._native.register(linear)
        return linear

    def make_delta(self, context: LayerContext, down: Tensor, up: Tensor, sizes: Sequence[int]) -> Delta:
        return CpuLowRankDelta(self._native, context, down, up, sizes)

    def make_adapted(self, linear: Linear, delta: Delta) -> Linear:
        if not isinstance(delta, CpuLowRankDelta):
            return super().make_adapted(linear, delta)
        return lambda x: delta(x, linear(x))  # which may be part of a program

    def room_for_rank(self, rank: int, dtype: torch.dtype) -> int:
        return -(-rank // LOW_RANK) * LOW_RANK if dtype == torch.bfloat16 else rank

    def order_adapter(self, down: Tensor, up: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        return (order_down(down), order_up(up)) if is_ordered(down, up, sizes) else (down, up)

    def make_lookup(self, table: Tensor | QuantizedWeight) -> Lookup:
        blocks = self._blocks(table)
        return super().make_lookup(table) if blocks is None else blocks.lookup

    def make_tied(self, table: Tensor | QuantizedWeight) -> tuple[Lookup, Linear]:
        blocks = self._blocks(table)
        if blocks is not None:
            return blocks.lookup, blocks
        if isinstance(table, QuantizedWeight):
            return super().make_tied(table)
        linear = TiedLinear(table, self._native.current)
        self._native.register(linear)
        return linear.lookup, linear

    def make_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        if isinstance(weight, Int8Weight) and weight.activation is not None:
            linear = CpuInt8Linear(weight, bias, self._native.current)
            self._native.register(linear)
            self.dequantized_bytes += linear.extra_bytes
            return linear
        result = weight.grouped() if isinstance(weight, Int8Weight) else weight
        if not fits_native(result):
            return super().make_quantized(weight, bias)
        native = self._native.wait()
        if native is None:
            reason = "there are no native products, which need AVX2 or NEON, and a C++ compiler"
            if self._native.isa < NEEDED_ISA <= processor_isa():
                reason = f"--cpu-isa {self._native.isa} switches the native products off"
            return self.make_dequantized(weight, bias, reason)
        packed: CpuGroupedLinear | CpuBlocksLinear
        if NativeBlocks.fits(result):
            packed = CpuBlocksLinear(result, bias, native)
        else:
            assert isinstance(result, GroupedWeight | Fp8Weight)
            packed = CpuGroupedLinear(result, bias, native)
        self.dequantized_bytes += packed.nbytes - weight.nbytes
        return packed

    def make_gated(self, weight: Projection, bias: Tensor | None) -> Linear:
        return self.gate(self.make_projection(weight, bias))

    def gate(self, linear: Linear) -> Linear:
        """``silu(gate) * up`` of the outputs gate | up of ``linear``; in one product if it has one."""

        def gated(x: Tensor) -> Tensor:
            out = linear.gated(x) if isinstance(linear, _GATED) else None
            return self.elementwise.silu_and_mul(linear(x)) if out is None else out

        return gated

    def make_float_head(self, weight: Projection, shared: bool) -> Linear:
        linear = super().make_float_head(weight, shared)

        def head(x: Tensor) -> Tensor:
            self._native.refuse("an output layer in float32")
            return linear(x)

        return head

    def fake_quantize(self, x: Tensor) -> Tensor:
        native = self._native.fitting(x.dtype, Native.fits_fake_quantize(x))
        return super().fake_quantize(x) if native is None else native.fake_quantize(x)

    def _blocks(self, table: Tensor | QuantizedWeight) -> CpuBlocksLinear | None:
        """A layer of a table in blocks, if there are native operators for it."""
        if not isinstance(table, QuantizedWeight) or not NativeBlocks.fits(table):
            return None
        native = self._native.wait()
        if native is None:
            return None
        linear = CpuBlocksLinear(table, None, native)
        self.dequantized_bytes += linear.nbytes - table.nbytes
        return linear
