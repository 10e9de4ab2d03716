"""Attention on an NPU: splits the rows of a step into kernel calls."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.core.attention_rows import AttentionRows
from kernels.devices.attention import Attention
from kernels.devices.memory import DeviceMemory
from kernels.devices.npu.backends import ASCEND, NATIVE, TREES, AttentionBackends
from kernels.devices.npu.cache import NpuCache, NpuCaches
from kernels.devices.npu.fused_attention import FusedPart, fused_attention, padded_dim, plan_part
from kernels.devices.npu.int8_cache import DequantizedPart, Int8Layer, attend_int8, compact
from kernels.devices.npu.native_attention import NativePart, native_attention, plan_native
from kernels.devices.npu.operators import rotate
from kernels.devices.npu.soc import Soc
from kernels.devices.npu.tree_attention import TreePart, plan_trees, tree_attention

__all__ = ["AttentionPlan", "NpuAttention"]


@dataclass(frozen=True)
class AttentionPlan:
    """The kernel calls of a step's attention, in the order of their tokens. ``rows``: the step's rows, unless in a
    graph."""

    parts: tuple[FusedPart | TreePart | NativePart | DequantizedPart, ...]
    rows: AttentionRows | None = None


class NpuAttention(Attention[NpuCache, AttentionPlan]):
    signed_sines = False

    def __init__(self, caches: NpuCaches, memory: DeviceMemory, backends: AttentionBackends, soc: Soc) -> None:
        super().__init__(caches)
        self._caches = caches
        self._put = memory.put
        self._backends = backends
        self.soc = soc

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        out.copy_(rotate(x, cos, sin))

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
        return AttentionPlan(tuple(self._part(rows, *call, window) for call in calls), rows)

    def attend(self, queries: Tensor, cache: NpuCache, plan: AttentionPlan, scale: float) -> Tensor:
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
                result.append(attend_int8(part_queries, held, part, scale))
            elif isinstance(part, TreePart):
                result.append(tree_attention(part_queries, held, part, scale))
            elif isinstance(part, FusedPart):
                result.append(fused_attention(part_queries, held, part, scale))
            else:
                result.append(native_attention(part_queries, held, part, scale))
        return (result[0] if len(result) == 1 else torch.cat(result)).reshape(len(queries), -1)

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
