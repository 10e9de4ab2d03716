"""Attention on an NVIDIA GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.core.attention_rows import AttentionRows
from kernels.core.batch import ForwardBatch
from kernels.core.operators import Norm
from kernels.devices.attention import Attention, QkvProjection
from kernels.devices.cuda.attention.decode import DecodeScratch
from kernels.devices.cuda.attention.latent_prompts import LatentPlan, attend_latent_rows, makes_keys, plan_latent
from kernels.devices.cuda.attention.plan import AttentionPlan, attention, plan_attention, plan_draft
from kernels.devices.cuda.cache import CudaCache, CudaCaches
from kernels.devices.cuda.elementwise.angles import angles
from kernels.devices.cuda.elementwise.latent_heads import place_latent
from kernels.devices.cuda.elementwise.norm_rope_cache import norm_rope_cache
from kernels.devices.cuda.elementwise.norms import CudaNorm
from kernels.devices.cuda.features import FEATURES
from kernels.devices.cuda.matmul.qkv_projection import CudaQkvProjection
from kernels.devices.latent_attention import LatentHeads
from kernels.devices.latent_cache import Vectors
from kernels.devices.linear import NormThenLinear
from kernels.devices.memory import DeviceMemory
from kernels.devices.row_attention import CapAndSinks

__all__ = ["CudaAttention"]


class CudaAttention(Attention[CudaCache, AttentionPlan]):
    """``invariant``: whether a token's results must not depend on the other rows of a step."""

    plans_latent = True

    def __init__(self, caches: CudaCaches, memory: DeviceMemory, page_size: int, invariant: bool = False) -> None:
        super().__init__(caches)
        self._caches = caches
        self._put = memory.put
        self._page_size = page_size
        self._invariant = invariant
        self.plans = frozenset() if invariant else FEATURES.plans
        self._latent_plan: LatentPlan | None = None
        self._scratch = None if invariant else DecodeScratch(memory.torch_device)

    def plan(self, rows: AttentionRows, window: int) -> AttentionPlan:
        return plan_attention(rows, window, self._caches.kv_heads, self._put)

    def plan_layers(self, rows: AttentionRows, window: int) -> AttentionPlan | None:
        """The kernels know chunks, but those whose results are invariant."""
        return super().plan_layers(rows, window) if self._invariant else self.plan(rows, window)

    def plan_draft(
        self, starts: Tensor, pages: Tensor, tokens: int, bits: Tensor | None, roots: Tensor | None, window: int
    ) -> AttentionPlan:
        return plan_draft(starts, pages, tokens, bits, roots, window, self._page_size)

    def attend(self, queries: Tensor, cache: CudaCache, plan: AttentionPlan, scale: float) -> Tensor:
        return attention(queries, cache, plan, scale, self._scratch)

    def attend_capped(
        self, queries: Tensor, cache: CudaCache, batch: ForwardBatch, window: int, scale: float, extra: CapAndSinks
    ) -> Tensor:
        if self._scratch is None:
            return super().attend_capped(queries, cache, batch, window, scale, extra)
        return attention(queries, cache, batch.plans[window], scale, self._scratch, extra)

    def attend_latent(
        self, queries: Tensor, cache: Vectors, batch: ForwardBatch, heads: LatentHeads, scale: float
    ) -> Tensor:
        fits = queries.shape[2] > heads.keys.shape[1] and heads.sinks is None  # kernels read a rotated part
        if self._scratch is None or not isinstance(cache, Tensor) or not fits:
            return super().attend_latent(queries, cache, batch, heads, scale)
        step, plan = batch.plans[0], self._latent_plan
        if plan is None or plan.step is not step:  # one for all layers of a step
            rope, makes = cache.shape[2] - heads.rank, makes_keys(queries, cache, heads)
            plan = plan_latent(step, heads, rope, self._put) if makes else LatentPlan(step, step, len(queries))
            self._latent_plan = plan
        return attend_latent_rows(queries, cache, plan, heads, scale, self._scratch)

    def place_latent(
        self, queries: Tensor, vectors: Tensor, norm: Norm, cos: Tensor, sin: Tensor, cache: Vectors, index: Tensor
    ) -> Tensor:
        if not isinstance(norm, CudaNorm) or not isinstance(cache, Tensor):
            return super().place_latent(queries, vectors, norm, cos, sin, cache, index)
        place_latent(queries, vectors, norm.weight, norm.eps, cos, sin, cache, index)
        return queries

    def angles(self, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return angles(positions, frequencies, scale, dtype)

    def norm_rope_cache(
        self, qkv: Tensor, heads: int, norm: Norm | None, cos: Tensor, sin: Tensor, cache: CudaCache, index: Tensor
    ) -> Tensor:
        if norm is not None and not isinstance(norm, CudaNorm):
            return super().norm_rope_cache(qkv, heads, norm, cos, sin, cache, index)
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        kv_heads = (qkv.shape[1] - heads) // 2
        norm_rope_cache(qkv, heads, kv_heads, weight, eps, cos, sin, cache, index, alone=self._invariant)
        return qkv[:, :heads]

    def make_qkv_projection(
        self, projection: NormThenLinear, heads: int, kv_heads: int, dim: int, norm: Norm | None
    ) -> QkvProjection[CudaCache]:
        kind = QkvProjection if self._invariant else CudaQkvProjection
        return kind(self, projection, heads, kv_heads, dim, norm)
