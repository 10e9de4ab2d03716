"""Attention on the CPU: native operators for bf16, else plain torch."""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kernels.contract.caches import Latent
from kernels.core.attention_rows import AttentionRows
from kernels.core.batch import ForwardBatch
from kernels.core.operators import Norm
from kernels.devices.attention import Attention
from kernels.devices.cpu.cache import CpuCache, CpuCaches
from kernels.devices.cpu.cache_8bit import Pages8bit, Plan8bit
from kernels.devices.cpu.native_operators import NativeOperators
from kernels.devices.cpu.norm import CpuNorm
from kernels.devices.cpu.operators import Native
from kernels.devices.cpu.paged_attention import (
    AttentionPlan,
    NativeLatentHeads,
    in_drafts,
    native_attention,
    native_latent,
    paged_attention,
)
from kernels.devices.invariant.attention import InvariantPlan
from kernels.devices.latent_attention import LatentHeads
from kernels.devices.latent_cache import Vectors
from kernels.devices.row_attention import CapAndSinks

__all__ = ["CpuAttention", "CpuPlan", "latent_rows"]

CpuPlan = AttentionPlan | Plan8bit | InvariantPlan


def latent_rows(batch: ForwardBatch) -> AttentionRows | None:
    """The rows of a step whose layers may attend by a plan or by rows."""
    plan = batch.plans.get(0)
    return batch.rows if batch.rows is not None or plan is None else plan.rows


class CpuAttention(Attention[CpuCache, CpuPlan]):
    plans = frozenset({"sinks", "offsets"})
    plans_latent = True

    def __init__(self, caches: CpuCaches, native: NativeOperators) -> None:
        super().__init__(caches)
        self._caches = caches
        self._native = native
        self._fitting = native.fitting
        self._latent_heads: WeakKeyDictionary[LatentHeads, NativeLatentHeads] = WeakKeyDictionary()

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

    def attend_capped(
        self, queries: Tensor, cache: CpuCache, batch: ForwardBatch, window: int, scale: float, extra: CapAndSinks
    ) -> Tensor:
        """As ``Attention.attend_capped``: sinks by native operators, else in plain torch over the rows of the plan."""
        native, plan = self._fitting(queries.dtype, self._caches.fits_native), batch.plans.get(window)
        kept = cache.kept if isinstance(cache, Pages8bit) else cache
        sinks_alone = not extra.cap and not extra.growth_length
        if native is not None and kept is not None and sinks_alone and isinstance(plan, AttentionPlan):
            return native_attention(queries, kept, plan, scale, native, sinks=extra.sinks)
        self._native.refuse("attention to such scores")
        rows = plan.rows if batch.rows is None and isinstance(plan, AttentionPlan | Plan8bit) else batch.rows
        return super().attend_capped(queries, cache, replace(batch, rows=rows), window, scale, extra)

    def hold_latent(self, heads: LatentHeads, spec: Latent) -> int:
        """As ``Attention.hold_latent``: both weights in the layout of native products. While the operators are compiled
        they are counted, and made by the first step that has the operators."""
        caches, native = self._caches, self._native
        read = caches.dtype is None and Native.fits_latent(caches.page_size, spec.dim + spec.rope_dim, spec.dim)
        if not read or not NativeLatentHeads.fits(heads) or (native.current is None and native.building is None):
            return 0
        if native.current is not None:
            self._latent_heads[heads] = NativeLatentHeads(native.current, heads)
        return heads.keys.nbytes + heads.values.nbytes  # the layout pads no size that fits

    @staticmethod
    def fits_latent(cache: Vectors, heads: LatentHeads) -> bool:
        """Whether all of ``attend_latent`` of short rows is native in bf16."""
        fits = isinstance(cache, Tensor) and Native.fits_latent(cache.shape[1], cache.shape[2], heads.rank)
        return fits and NativeLatentHeads.fits(heads)

    def attend_latent(
        self, queries: Tensor, cache: Vectors, batch: ForwardBatch, heads: LatentHeads, scale: float
    ) -> Tensor:
        """As ``Attention.attend_latent``: decodes and short chunks by native operators, where vectors are bf16."""
        rows, fits = latent_rows(batch), False
        if isinstance(cache, Tensor) and heads.sinks is None:
            fits = Native.fits_latent(cache.shape[1], cache.shape[2], heads.rank)
        packs = self.fits_latent(cache, heads)
        native = self._fitting(queries.dtype, packs if self._native.recording else fits)
        if native is None or rows is None:
            return super().attend_latent(queries, cache, replace(batch, rows=rows), heads, scale)
        assert isinstance(cache, Tensor)
        packed = self._latent_heads.get(heads) if packs else None
        if packs and packed is None:
            packed = self._latent_heads[heads] = NativeLatentHeads(native, heads)
        return native_latent(queries, cache, rows, heads, scale, native, packed)

    def place_latent(
        self, queries: Tensor, vectors: Tensor, norm: Norm, cos: Tensor, sin: Tensor, cache: Vectors, index: Tensor
    ) -> Tensor:
        rope = cos.shape[-1]
        fits = isinstance(cache, Tensor) and rope % 32 == 0 and (vectors.shape[1] - rope) % 16 == 0
        native = self._fitting(queries.dtype, fits and isinstance(norm, CpuNorm))
        if native is None:
            return super().place_latent(queries, vectors, norm, cos, sin, cache, index)
        assert isinstance(cache, Tensor)
        assert isinstance(norm, CpuNorm)
        native.place_latent(queries, vectors, (norm.plain, norm.eps), cos, sin, cache, index)
        return queries

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
