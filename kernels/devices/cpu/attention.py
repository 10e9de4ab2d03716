"""Attention on the CPU: native operators for bf16, else plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.core.attention_rows import AttentionRows
from kernels.core.operators import Norm
from kernels.devices.attention import Attention
from kernels.devices.cpu.cache import CpuCache, CpuCaches
from kernels.devices.cpu.cache_8bit import Pages8bit, Plan8bit
from kernels.devices.cpu.native_operators import NativeOperators
from kernels.devices.cpu.norm import CpuNorm
from kernels.devices.cpu.operators import Native
from kernels.devices.cpu.paged_attention import AttentionPlan, in_drafts, native_attention, paged_attention
from kernels.devices.invariant.attention import InvariantPlan

__all__ = ["CpuAttention", "CpuPlan"]

CpuPlan = AttentionPlan | Plan8bit | InvariantPlan


class CpuAttention(Attention[CpuCache, CpuPlan]):
    def __init__(self, caches: CpuCaches, native: NativeOperators) -> None:
        super().__init__(caches)
        self._caches = caches
        self._native = native
        self._fitting = native.fitting

    def plan(self, rows: AttentionRows, window: int) -> CpuPlan:
        planner = self._caches.planner
        assert planner is not None, "KvCaches.make comes first"
        native = self._native.current is not None and self._caches.fits_native
        if self._caches.dtype is None or native:
            return planner.plan(in_drafts(rows) if native and self._native.batch_invariant else rows, window, native)
        return Plan8bit(planner, rows, window)

    def attend(self, queries: Tensor, cache: CpuCache, plan: CpuPlan, scale: float) -> Tensor:
        native = self._fitting(queries.dtype, self._caches.fits_native)
        if isinstance(plan, Plan8bit):
            assert isinstance(cache, Pages8bit)
            over_pages, pages = plan.over_pages
            return paged_attention(queries, cache.widened(pages, queries.dtype), over_pages, scale)
        assert isinstance(plan, AttentionPlan)
        if native is None:
            assert isinstance(cache, Tensor)
            return paged_attention(queries, cache, plan, scale)
        kept = cache.kept if isinstance(cache, Pages8bit) else cache
        assert kept is not None
        return native_attention(queries, kept, plan, scale, native)

    def angles(self, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        native = self._fitting(dtype, True)
        if native is not None:  # also without a program, whose numbers are the same then
            return native.angles(positions, frequencies, scale)
        return super().angles(positions, frequencies, scale, dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        native = self._fitting(x.dtype, Native.fits_rotary(x))
        if native is not None:
            return native.rotary(x, cos, sin, out)
        super().rotate(x, cos, sin, out)

    def norm_rope_cache(
        self, qkv: Tensor, heads: int, norm: Norm | None, cos: Tensor, sin: Tensor, cache: CpuCache, index: Tensor
    ) -> Tensor:
        kept = cache.kept if isinstance(cache, Pages8bit) else cache
        if kept is None or not (norm is None or isinstance(norm, CpuNorm)):
            return super().norm_rope_cache(qkv, heads, norm, cos, sin, cache, index)
        native = self._fitting(qkv.dtype, Native.fits_norm_rope_cache(qkv.shape[2]))
        if native is None:
            return super().norm_rope_cache(qkv, heads, norm, cos, sin, cache, index)
        weight = None if norm is None else (norm.plain, norm.eps)
        native.norm_rope_cache(qkv, heads, weight, cos, sin, kept, index)
        return qkv[:, :heads]
