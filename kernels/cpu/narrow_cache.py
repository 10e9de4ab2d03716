"""A cache of keys and values in fewer bits, on the CPU: floats are made of the pages that a step reads.

Each layer's in turn, in memory that they share and that the system gives as it is written: the pages that a step reads,
each once, as they are without.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.attention import AttentionPlan, AttentionPlanner
from kernels.cpu.kept_pages import kept_pages
from kernels.cpu.operators import Native
from kernels.platforms.rows import AttentionRows
from kernels.quantization.cache import LayerScales, round_fixed, round_tokens, widen

__all__ = ["NarrowPages", "NarrowPlan"]


@dataclass(frozen=True, eq=False)
class NarrowPages:
    """One layer. ``values`` [pages, page_size, 2, kv_heads, dim]; ``scales`` [pages, page_size, 2, kv_heads], each
    token's, or ``fixed``, or neither where 16 bits are kept. ``room``: as ``values``, for what native operators widen.
    """

    values: Tensor
    scales: Tensor | None
    fixed: LayerScales | None
    room: Tensor

    @property
    def native(self) -> bool:
        """Whether native operators know its numbers."""
        return self.values.element_size() == 1 and self.values.shape[-1] % 16 == 0

    def write(self, index: Tensor, keys_values: Tensor, native: Native | None) -> None:
        """As ``Platform.write_cache``."""
        if native is not None and self.native:
            return native.write_narrow(self.values, self.scales, self.fixed, index, keys_values)
        both, kept = keys_values.unflatten(1, (2, -1)), self.values.dtype
        if self.scales is not None:
            both, scales = round_tokens(both, kept, self.scales.dtype)
            self.scales.view(-1, *self.scales.shape[2:]).index_copy_(0, index, scales)
        else:
            both = both.to(kept) if self.fixed is None else round_fixed(both, self.fixed, kept)
        self._tokens.index_copy_(0, index, _bits(both))

    def move(self, source: Tensor, target: Tensor) -> None:
        """As ``Platform.move_cache``."""
        parts = [self._tokens]
        if self.scales is not None:
            parts.append(self.scales.view(-1, *self.scales.shape[2:]))
        for part in parts:
            part.index_copy_(0, target, part.index_select(0, source))

    def clear(self, pages: list[int]) -> None:
        """As ``Platform.clear_pages``."""
        _bits(self.values)[pages] = 0
        if self.scales is not None:
            self.scales[pages] = 0

    def widened(self, pages: Tensor, dtype: torch.dtype, native: Native | None = None) -> Tensor:
        """What ``pages`` int64 hold: [pages, page_size, 2, kv_heads, dim]. While recording those of a step, as many as
        there may be."""
        if native is not None and self.native and dtype == self.room.dtype:
            native.widen(self.values, self.scales, self.fixed, pages, self.room)
            return self.room if native.recording else self.room[: len(pages)]
        values = _bits(self.values).index_select(0, pages).view(self.values.dtype)
        scales = None if self.scales is None else self.scales.index_select(0, pages)
        return widen(values, scales, self.fixed, dtype)

    @property
    def _tokens(self) -> Tensor:
        return _bits(self.values).view(-1, *self.values.shape[2:])


@dataclass(frozen=True)
class NarrowPlan:
    """Of ``rows`` of a step. ``native``: for native operators."""

    planner: AttentionPlanner
    rows: AttentionRows
    window: int
    native: bool

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
        plan = self.planner.plan(replace(rows, pages=table), self.window, self.native)
        return plan, torch.from_numpy(pages)


def _bits(values: Tensor) -> Tensor:
    """Numbers of 8 bits as such that every operator copies."""
    return values.view(torch.int8) if values.element_size() == 1 else values
