"""Attention on an NPU: splits the rows of a step into kernel calls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch_npu
from torch import Tensor

from kernels.core.attention_rows import AttentionRows
from kernels.core.batch import ForwardBatch
from kernels.core.operators import Norm, PendingResidual
from kernels.devices.attention import Attention, QkvProjection
from kernels.devices.latent_attention import LatentHeads, LatentPrologue, LatentWeights, attend_latent_heads
from kernels.devices.latent_cache import SplitLatent, Vectors
from kernels.devices.linear import NormThenLinear
from kernels.devices.memory import DeviceMemory
from kernels.devices.npu.backends import ASCEND, NATIVE, TREES, AttentionBackends
from kernels.devices.npu.cache import NpuCache, NpuCaches
from kernels.devices.npu.features import FEATURES
from kernels.devices.npu.fused_attention import DIMS, FusedPart, LayerCache, fused_attention, padded_dim, plan_part
from kernels.devices.npu.int8_cache import DequantizedPart, Int8Layer, attend_int8, compact
from kernels.devices.npu.latent_attention import (
    LatentPlan,
    attend_absorbed,
    attend_expanded,
    attend_sparse,
    choose_tokens,
    fits_expanded,
    fits_heads,
    fits_latent,
    place_latent,
    plan_latent,
)
from kernels.devices.npu.latent_prologue import NpuLatentPrologue, fits_prolog
from kernels.devices.npu.native_attention import NativePart, native_attention, plan_native
from kernels.devices.npu.operators import NpuNorm, rotate, write_cache
from kernels.devices.npu.soc import Soc
from kernels.devices.npu.tree_attention import TreePart, plan_trees, tree_attention
from kernels.devices.row_attention import CapAndSinks

__all__ = ["AttentionPlan", "NpuAttention"]


_ROTATED_DIMS = (64, 128)
"""The head dims of npu_apply_rotary_pos_emb on A2 and A3."""


class NpuQkvProjection(QkvProjection[NpuCache]):
    """Queries and keys are copied apart once, normed by a kernel each and rotated by one."""

    def __init__(
        self,
        attention: Attention[NpuCache, Any],
        projection: NormThenLinear,
        heads: int,
        kv_heads: int,
        dim: int,
        norm: Norm | None,
    ) -> None:
        super().__init__(attention, projection, heads, kv_heads, dim, norm)
        self._norms = None if norm is None else _norms_apart(norm, heads)

    def __call__(
        self, x: PendingResidual, residual: Tensor, cos: Tensor, sin: Tensor, cache: NpuCache, index: Tensor
    ) -> tuple[Tensor, Tensor]:
        projected, total = self.projection.add(x, residual)
        parts = projected.view(-1, self.heads + 2 * self.kv_heads, self.dim).split(
            (self.heads, self.kv_heads, self.kv_heads), 1
        )
        queries, keys, values = (part.contiguous() for part in parts)
        if self._norms is not None:
            queries, keys = self._norms[0](queries), self._norms[1](keys)
        queries, keys = torch_npu.npu_apply_rotary_pos_emb(queries, keys, cos, sin, layout="TND")
        if isinstance(cache, Int8Layer):
            cache.write(index, torch.cat((keys, values), 1))
        else:
            write_cache(keys, values, cache.keys, cache.values, index)
        return queries, total


class OwnQkvProjection(QkvProjection[NpuCache]):
    """Everything between the projection and attention in one kernel of our own. ``otherwise``: for what it does not
    take, a cache of int8 and float32."""

    def __init__(self, otherwise: QkvProjection[NpuCache]) -> None:
        it = otherwise
        super().__init__(it.attention, it.projection, it.heads, it.kv_heads, it.dim, it.norm)
        self._otherwise = otherwise
        self._weight: Tensor | None = None
        self._eps = 0.0
        if isinstance(it.norm, NpuNorm):
            weight = it.norm.gamma if it.norm.head_weight is None else it.norm.head_weight
            self._weight = weight.expand(it.heads + it.kv_heads, it.dim).contiguous()
            self._eps = it.norm.eps

    @staticmethod
    def fits(dim: int, norm: Norm | None) -> bool:
        """Whether the kernel takes such heads."""
        return dim % 2 == 0 and (norm is None or isinstance(norm, NpuNorm))

    def __call__(
        self, x: PendingResidual, residual: Tensor, cos: Tensor, sin: Tensor, cache: NpuCache, index: Tensor
    ) -> tuple[Tensor, Tensor]:
        if not isinstance(cache, LayerCache) or cache.keys.dtype == torch.float32:
            return self._otherwise(x, residual, cos, sin, cache, index)
        projected, total = self.projection.add(x, residual)
        qkv = projected.view(-1, self.heads + 2 * self.kv_heads, self.dim)
        queries: Tensor = torch.ops.troupe.split_norm_rope_cache(
            qkv, self._weight, self._eps, cos, sin, cache.keys, cache.values, index, self.heads
        )
        return queries, total


def _norms_apart(norm: Norm, heads: int) -> tuple[NpuNorm, NpuNorm] | None:
    """The norm of the first ``heads`` heads, which are queries, and that of the others; None where the kernel has no
    weight for them: heads with weights of their own."""
    if not isinstance(norm, NpuNorm):
        return None
    if norm.head_weight is None:
        return norm, norm
    parts = norm.head_weight[:heads], norm.head_weight[heads:]
    if not all(torch.equal(part, part[:1].expand_as(part)) for part in parts):
        return None
    return NpuNorm(parts[0][0].clone(), norm.eps), NpuNorm(parts[1][0].clone(), norm.eps)


@dataclass(frozen=True)
class AttentionPlan:
    """The kernel calls of a step's attention, in the order of their tokens. ``rows``: the step's rows, unless in a
    graph, and the ``window`` of their layers."""

    parts: tuple[FusedPart | TreePart | NativePart | DequantizedPart, ...]
    rows: AttentionRows | None = None
    window: int = 0


class NpuAttention(Attention[NpuCache, AttentionPlan]):
    signed_sines = False
    pairs_latent = True
    plans_latent = True

    def __init__(
        self,
        caches: NpuCaches,
        memory: DeviceMemory,
        backends: AttentionBackends,
        soc: Soc,
        own: frozenset[str] = frozenset(),
    ) -> None:
        """``own``: our own kernels that the device uses (``npu_triton``)."""
        super().__init__(caches)
        self._own = own
        self._caches = caches
        self._put = memory.put
        self._backends = backends
        self.soc = soc
        self._latent_plan: LatentPlan | None = None
        self.plans = FEATURES.plans

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        out.copy_(rotate(x, cos, sin))

    def make_qkv_projection(
        self, projection: NormThenLinear, heads: int, kv_heads: int, dim: int, norm: Norm | None
    ) -> QkvProjection[NpuCache]:
        fuses = self.soc.rotates_queries_and_keys and dim in _ROTATED_DIMS
        if fuses and (norm is None or _norms_apart(norm, heads) is not None):
            result: QkvProjection[NpuCache] = NpuQkvProjection(self, projection, heads, kv_heads, dim, norm)
        else:
            result = super().make_qkv_projection(projection, heads, kv_heads, dim, norm)
        if "split_norm_rope_cache" in self._own and OwnQkvProjection.fits(dim, norm):
            return OwnQkvProjection(result)
        return result

    def plan(self, rows: AttentionRows, window: int) -> AttentionPlan:
        first, short, last = rows.decodes, rows.decodes + rows.verifies, len(rows.starts)
        tree = rows.tree is not None and first < short and int(rows.counts[first:short].max()) > 1
        backends = self._backends
        verify = TREES if tree and backends.verify == ASCEND else backends.verify
        calls: list[tuple[int, int, str]] = []
        for low, high, kind in ((0, first, backends.decode), (first, short, verify), (short, last, backends.prefill)):
            if low == high:
                continue
            narrow = self._caches.dtype == torch.int8 and window == 0  # whose decodes are separate calls
            apart = kind == TREES or (low == first and (self.soc.splits_mixed_steps or narrow))
            if calls and calls[-1][2] == kind and not apart:
                low = calls.pop()[0]
            calls.append((low, high, kind))
        return AttentionPlan(tuple(self._part(rows, *call, window) for call in calls), rows, window)

    def attend(self, queries: Tensor, cache: NpuCache, plan: AttentionPlan, scale: float) -> Tensor:
        return self._attend(queries, cache, plan, scale, None)

    def attend_capped(
        self, queries: Tensor, cache: NpuCache, batch: ForwardBatch, window: int, scale: float, extra: CapAndSinks
    ) -> Tensor:
        if extra.cap or extra.growth_length:
            return super().attend_capped(queries, cache, batch, window, scale, extra)
        return self._attend(queries, cache, batch.plans[window], scale, extra.sinks)

    def _attend(
        self, queries: Tensor, cache: NpuCache, plan: AttentionPlan, scale: float, sinks: Tensor | None
    ) -> Tensor:
        if queries.shape[2] > DIMS[-1] and plan.rows is not None:  # no operator takes them
            return self.attend_rows(queries, cache, plan.rows, plan.window, scale, 0.0, sinks)
        result = []
        for part in plan.parts:
            held: NpuCache = cache
            if isinstance(part, DequantizedPart):
                assert isinstance(cache, Int8Layer)
                dim, dtype = queries.shape[2], queries.dtype
                if not isinstance(part.part, NativePart):
                    dim, dtype = padded_dim(dim), torch.bfloat16
                held = cache.dequantized(part.pages, dtype, dim)
                part = part.part
            part_queries = queries[part.begin : part.end]
            if isinstance(held, Int8Layer):
                assert isinstance(part, FusedPart)
                result.append(attend_int8(part_queries, held, part, scale, sinks))
            elif isinstance(part, TreePart):
                result.append(tree_attention(part_queries, held, part, scale, sinks))
            elif isinstance(part, FusedPart):
                result.append(fused_attention(part_queries, held, part, scale, sinks))
            else:
                result.append(native_attention(part_queries, held, part, scale, sinks))
        return (result[0] if len(result) == 1 else torch.cat(result)).reshape(len(queries), -1)

    def place_latent(
        self, queries: Tensor, vectors: Tensor, norm: Norm, cos: Tensor, sin: Tensor, cache: Vectors, index: Tensor
    ) -> Tensor:
        if isinstance(cache, SplitLatent) and isinstance(norm, NpuNorm):
            return place_latent(queries, vectors, norm, cos, sin, cache, index)
        rope = cos.shape[-1]
        rotated = vectors[:, -rope:].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)  # halves
        vectors = torch.cat((vectors[:, :-rope], rotated), 1)
        return super().place_latent(queries, vectors, norm, cos, sin, cache, index)

    def attend_latent(
        self, queries: Tensor, cache: Vectors, batch: ForwardBatch, heads: LatentHeads, scale: float
    ) -> Tensor:
        rows, mask = self._host_rows(batch), self._caches.mask
        if rows is None:
            part = batch.plans[0].parts[0]
            if not isinstance(part, FusedPart) or not isinstance(cache, SplitLatent):
                raise RuntimeError("trees of draft tokens over latent vectors are not captured")
            return attend_absorbed(queries, cache, part, heads, scale, self.soc)
        if mask is None or rows.tree is not None or not fits_latent(cache, heads):
            return super().attend_latent(queries, cache, replace(batch, rows=rows), heads, scale)
        assert isinstance(cache, SplitLatent)
        plan, result = self._latent_rows(rows), []
        if plan.tokens:
            part = plan.first_part(mask)
            result.append(attend_absorbed(queries[: plan.tokens], cache, part, heads, scale, self.soc))
        if plan.tokens < len(queries):
            later = queries[plan.tokens :]
            if fits_expanded(heads):
                result.append(attend_expanded(later, cache, plan, heads, scale, mask))
            else:
                result.append(attend_latent_heads(later, cache, plan.later_rows(), heads, scale))
        return result[0] if len(result) == 1 else torch.cat(result)

    def fits_prologue(self, hidden: int, query_rank: int, heads: int, dims: tuple[int, int, int, int]) -> bool:
        fused = self._backends.decode == ASCEND and self._caches.dtype is None
        return fused and self.soc.projects_latent and fits_prolog(hidden, query_rank, heads, dims)

    def make_latent_prologue(self, weights: LatentWeights) -> LatentPrologue | None:
        if not NpuLatentPrologue.fits(weights):
            return None
        return NpuLatentPrologue(weights, self.latent_part, self.soc)

    def latent_part(self, batch: ForwardBatch) -> FusedPart | None:
        """The call that attends to latent vectors in the whole of a step, or of a pass that is captured."""
        rows, mask = self._host_rows(batch), self._caches.mask
        if rows is None:
            part = batch.plans[0].parts[0]
            return part if isinstance(part, FusedPart) else None
        if rows.tree is not None or mask is None:
            return None
        plan = self._latent_rows(rows)
        return plan.first_part(mask) if plan.tokens == int(rows.counts.sum()) else None

    def choose_tokens(self, queries: Tensor, weights: Tensor, keys: Vectors, batch: ForwardBatch, top_k: int) -> Any:
        chosen = None
        if isinstance(keys, Tensor) and batch.rows is not None and batch.rows.tree is None:
            chosen = choose_tokens(queries, weights, keys, self._latent_rows(batch.rows), top_k)
        return super().choose_tokens(queries, weights, keys, batch, top_k) if chosen is None else chosen

    def attend_chosen(
        self, queries: Tensor, cache: Vectors, batch: ForwardBatch, heads: LatentHeads, scale: float, chosen: Any
    ) -> Tensor:
        rows = batch.rows
        if not isinstance(chosen, Tensor) or rows is None:
            return super().attend_chosen(queries, cache, batch, heads, scale, chosen)
        if isinstance(cache, SplitLatent) and fits_heads(heads):
            return attend_sparse(queries, cache, self._latent_rows(rows), heads, scale, chosen, self.soc)
        by_row = list(chosen.squeeze(1).long().split(rows.counts.tolist()))
        return super().attend_chosen(queries, cache, batch, heads, scale, by_row)

    def _host_rows(self, batch: ForwardBatch) -> AttentionRows | None:
        """The rows of a step; None in a pass that is captured."""
        if batch.rows is not None or 0 not in batch.plans:
            return batch.rows
        rows: AttentionRows | None = batch.plans[0].rows
        return rows

    def _latent_rows(self, rows: AttentionRows) -> LatentPlan:
        """One plan for all layers of a step."""
        plan = self._latent_plan
        if plan is None or plan.rows is not rows:
            plan = self._latent_plan = plan_latent(rows, self._put)
        return plan

    def _part(
        self, rows: AttentionRows, first: int, last: int, kind: str, window: int
    ) -> FusedPart | TreePart | NativePart | DequantizedPart:
        """One kernel call; over dequantized pages, unless the kernel reads an int8 cache itself."""
        reads_int8 = kind == ASCEND and last <= rows.decodes and window == 0
        if self._caches.dtype != torch.int8 or reads_int8:
            return self._call(rows, first, last, kind, window)
        rows, pages = compact(rows, first, last, self._caches.page_size, self._put)
        return DequantizedPart(self._call(rows, first, last, kind, window), pages)

    def _call(
        self, rows: AttentionRows, first: int, last: int, kind: str, window: int
    ) -> FusedPart | TreePart | NativePart:
        if kind == NATIVE:
            return plan_native(rows, first, last, window, self._put)
        if kind == TREES:
            return plan_trees(rows, window, self._caches.page_size, self._put)
        assert self._caches.mask is not None, "KvCaches.make comes first"
        return plan_part(rows, first, last, window, self._caches.mask, self._put)
