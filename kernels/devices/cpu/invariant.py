"""A CPU whose results for a token do not depend on what else a step runs.

Native operators have this property: each row is computed by itself, or its sums are added up in one order whatever rows
are beside it. Three of them have it in the mode ``batch_invariant``: products with weights of few bits multiply no more
rows at a time than they treat in one way, attention treats a prompt as drafts, and experts of few bits run in turn.
Whatever has no native operator is computed as in ``kernels.devices.invariant``; which of both serves a layer depends on
its dtype and sizes alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.contract.config import RunnerConfig
from kernels.core.attention_rows import AttentionRows
from kernels.core.batch import ForwardBatch
from kernels.core.layer_context import Delta, LayerContext
from kernels.core.operators import Linear, Lookup, Norm
from kernels.devices.cpu.attention import CpuAttention, CpuPlan, latent_rows
from kernels.devices.cpu.cache import CpuCache, CpuCaches
from kernels.devices.cpu.capture import CpuCapture
from kernels.devices.cpu.device import CpuDevice
from kernels.devices.cpu.elementwise import CpuElementwise
from kernels.devices.cpu.experts import CpuExpertLayers
from kernels.devices.cpu.linear import CpuLinearLayers, fits_native
from kernels.devices.cpu.low_rank import is_ordered
from kernels.devices.cpu.native_operators import NativeOperators
from kernels.devices.cpu.operators import Native
from kernels.devices.cpu.paged_attention import in_drafts
from kernels.devices.fallbacks import Fallbacks
from kernels.devices.invariant.attention import InvariantPlan, Put
from kernels.devices.invariant.capabilities import InvariantAttention, InvariantElementwise, refuse_ranks
from kernels.devices.invariant.low_rank import InvariantDelta, InvariantLookupDelta
from kernels.devices.invariant.matmul import TiledLinear
from kernels.devices.invariant.norm import InvariantNorm
from kernels.devices.latent_attention import LatentHeads
from kernels.devices.latent_cache import Vectors
from kernels.devices.linear import LinearLayers
from kernels.weights.quantization.weights import QuantizedWeight

__all__ = ["InvariantCpuDevice"]


class InvariantCpuDevice(CpuDevice):
    """Like ``CpuDevice``. Native operators are compiled before the model is loaded, so that all steps use them.
    Quantized weights without native products are dequantized.
    """

    def __init__(self, config: RunnerConfig) -> None:
        refuse_ranks(config, "ranks", "with --tensor-parallel-size 1")
        super().__init__(config.threads, batch_invariant=True, host_workers=config.host_workers)
        self.traits = dataclasses.replace(self.traits, samples_row_by_row=True)
        fallbacks = Fallbacks()
        self.elementwise = _Elementwise(self.native)
        self.linear = linear = _LinearLayers(self.elementwise, fallbacks, self.native)
        self.experts = CpuExpertLayers(linear, fallbacks, self.native)
        self.attention = attention = _Attention(self.cache, self.native, self.memory.put)
        self.capture = CpuCapture(self.native, attention, ranks=1)

    def select_dtype(self, requested: str, stored: str | None) -> torch.dtype:
        result = super().select_dtype(requested, stored)
        self.native.wait()
        return result


class _Norm(InvariantNorm):
    def __init__(self, weight: Tensor, eps: float, native: NativeOperators) -> None:
        super().__init__(weight, eps)
        self._native = native

    def __call__(self, x: Tensor) -> Tensor:
        self._native.refuse("a norm's shape")
        return super().__call__(x)


class _Elementwise(CpuElementwise, InvariantElementwise):
    """``CpuElementwise`` falls back to ``InvariantElementwise``."""

    def make_norm(self, weight: Tensor, eps: float) -> Norm:
        if self._native.current is not None and Native.fits_norm(weight):
            return super().make_norm(weight, eps)
        return _Norm(weight, eps, self._native)


class _LinearLayers(CpuLinearLayers):
    """Products of torch are in tiles of one size."""

    def _serves(self, weight: Tensor) -> bool:
        return self._native.current is not None and weight.dtype == torch.bfloat16 and Native.fits_linear(weight)

    def make_dense(self, weight: Tensor, bias: Tensor | None, shared: bool = False) -> Linear:
        linear = super().make_dense(weight, bias, shared)
        return linear if self._serves(weight) else TiledLinear(linear, weight.shape[1], weight)

    def make_delta(self, context: LayerContext, down: Tensor, up: Tensor, sizes: Sequence[int]) -> Delta:
        if self._has_native_delta(down, up, sizes):
            return super().make_delta(context, down, up, sizes)
        return InvariantDelta(context, down, up, sizes)

    def order_adapter(self, down: Tensor, up: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        return super().order_adapter(down, up, sizes) if self._has_native_delta(down, up, sizes) else (down, up)

    def _has_native_delta(self, down: Tensor, up: Tensor, sizes: Sequence[int]) -> bool:
        return self._native.current is not None and is_ordered(down, up, sizes)

    def make_lookup_delta(self, context: LayerContext, down: Tensor, up: Tensor) -> Delta:
        return InvariantLookupDelta(context, down, up)

    def make_tied(self, table: Tensor | QuantizedWeight) -> tuple[Lookup, Linear]:
        if isinstance(table, Tensor) and not self._serves(table):
            return LinearLayers.make_tied(self, table)
        return super().make_tied(table)

    def make_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        if self._native.current is not None and fits_native(weight):
            return super().make_quantized(weight, bias)
        reason = "--enable-deterministic-inference has products of floats alone where there are no native ones"
        return self.make_dequantized(weight, bias, reason)

    def make_float_linear(self, weight: Tensor) -> Linear:
        linear = self.make_dense(weight, None)
        return lambda x: linear(x.float())


class _Attention(CpuAttention):
    invariant_latent = True

    def __init__(self, caches: CpuCaches, native: NativeOperators, put: Put) -> None:
        super().__init__(caches, native)
        self._plain: InvariantAttention[CpuCache] = InvariantAttention(caches, caches, put)

    def plan(self, rows: AttentionRows, window: int) -> CpuPlan:
        if self._native.current is not None and self._caches.fits_native:
            return super().plan(rows, window)
        return self._plain.plan(rows, window)

    def attend(self, queries: Tensor, cache: CpuCache, plan: CpuPlan, scale: float) -> Tensor:
        if not isinstance(plan, InvariantPlan):
            return super().attend(queries, cache, plan, scale)
        self._native.refuse("attention to heads of such sizes")
        return self._plain.attend(queries, cache, plan, scale)

    def attend_latent(
        self, queries: Tensor, cache: Vectors, batch: ForwardBatch, heads: LatentHeads, scale: float
    ) -> Tensor:
        rows = latent_rows(batch)
        if self._fitting(queries.dtype, self.fits_latent(cache, heads)) is None:
            return self._plain.attend_latent(queries, cache, dataclasses.replace(batch, rows=rows), heads, scale)
        assert rows is not None, "fitting operators have a plan"
        return super().attend_latent(queries, cache, dataclasses.replace(batch, rows=in_drafts(rows)), heads, scale)

    def angles(self, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self._fitting(dtype, True) is None:
            return self._plain.angles(positions, frequencies, scale, dtype)
        return super().angles(positions, frequencies, scale, dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        if self._fitting(x.dtype, Native.fits_rotary(x)) is None:
            return self._plain.rotate(x, cos, sin, out)
        super().rotate(x, cos, sin, out)
