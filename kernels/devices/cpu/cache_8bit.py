"""A cache of keys and values in fewer bits, on the CPU: native operators attend to it as it is. Else floats are made of
the pages that a step reads, each once, one layer after another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kernels.core.attention_rows import AttentionRows
from kernels.devices.cpu.kept_pages import kept_pages
from kernels.devices.cpu.operators import Cache8bit, Native
from kernels.devices.cpu.paged_attention import AttentionPlan, AttentionPlanner
from kernels.weights.quantization.cache import LayerScales, round_fixed, round_tokens, widen

__all__ = ["Pages8bit", "Plan8bit"]


@dataclass(frozen=True, eq=False)
class Pages8bit:
    """One layer. ``values`` [pages, page_size, 2, kv_heads, dim]; ``scales`` [pages, page_size, 2, kv_heads], each
    token's, or ``fixed``, or neither where 16 bits are kept.
    """

    values: Tensor
    scales: Tensor | None
    fixed: LayerScales | None

    @cached_property
    def kept(self) -> Cache8bit | None:
        """The same for native operators; None: they do not know its numbers."""
        if self.values.element_size() > 1 or self.values.shape[-1] % 32:
            return None
        by_head = None
        if self.fixed is not None and self.fixed.offsets is None:
            first = self.fixed.scales[..., :1]
            by_head = first.squeeze(-1).contiguous() if bool((self.fixed.scales == first).all()) else None
        return Cache8bit(self.values, self.scales, self.fixed, by_head)

    def write(self, index: Tensor, keys_values: Tensor, native: Native | None) -> None:
        """As ``KvCaches.write``."""
        if native is not None and self.kept is not None:
            return native.write_8bit(self.kept, index, keys_values)
        both, kept = keys_values.unflatten(1, (2, -1)), self.values.dtype
        if self.scales is not None:
            both, scales = round_tokens(both, kept, self.scales.dtype)
            self.scales.view(-1, *self.scales.shape[2:]).index_copy_(0, index, scales)
        else:
            both = both.to(kept) if self.fixed is None else round_fixed(both, self.fixed, kept, marked=True)
        self._tokens.index_copy_(0, index, _bits(both))

    def move(self, source: Tensor, target: Tensor) -> None:
        """As ``KvCaches.move``."""
        parts = [self._tokens]
        if self.scales is not None:
            parts.append(self.scales.view(-1, *self.scales.shape[2:]))
        for part in parts:
            part.index_copy_(0, target, part.index_select(0, source))

    def clear(self, pages: list[int]) -> None:
        """As ``KvCaches.clear``."""
        _bits(self.values)[pages] = 0
        if self.scales is not None:
            self.scales[pages] = 0

    def widened(self, pages: Tensor, dtype: torch.dtype) -> Tensor:
        """The contents of ``pages`` int64: [pages, page_size, 2, kv_heads, dim]."""
        values = _bits(self.values).index_select(0, pages).view(self.values.dtype)
        scales = None if self.scales is None else self.scales.index_select(0, pages)
        return widen(values, scales, self.fixed, dtype)

    def widened_tokens(self, places: Tensor) -> Tensor:
        """The contents of ``places`` int64: float32 [places, 2, kv_heads, dim]."""
        values = self._tokens.index_select(0, places).view(self.values.dtype)
        scales = self.scales
        if scales is not None:
            scales = scales.view(-1, *scales.shape[2:]).index_select(0, places)
        return widen(values, scales, self.fixed, torch.float32)

    @property
    def _tokens(self) -> Tensor:
        return _bits(self.values).view(-1, *self.values.shape[2:])


@dataclass(frozen=True)
class Plan8bit:
    """The plan of a step's ``rows`` over floats that are made from its pages."""

    planner: AttentionPlanner
    rows: AttentionRows
    window: int

    @cached_property
    def over_pages(self) -> tuple[AttentionPlan, Tensor]:
        """The plan over the pages int64 that the rows read, one after the other, and these."""
        rows, first = self.rows, None
        if self.window:
            first = rows.starts.copy()
            if rows.tree is not None and rows.roots is not None:
                first[rows.decodes : rows.decodes + rows.verifies] = rows.roots
            first = np.maximum(first + 1 - self.window, 0)
        table, pages = kept_pages(rows.pages, rows.starts + rows.counts, self.planner.page_size, first)
        plan = self.planner.plan(replace(rows, pages=table), self.window)
        return plan, torch.from_numpy(pages)


def _bits(values: Tensor) -> Tensor:
    """Numbers of 8 bits as such that every operator copies."""
    return values.view(torch.int8) if values.element_size() == 1 else values
