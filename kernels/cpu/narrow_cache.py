"""A cache of keys and values in fewer bits, on the CPU: floats are made of the pages that a step reads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.attention import AttentionPlan
from kernels.platforms.base import AttentionRows
from kernels.quantization.cache import LayerScales, round_fixed, round_tokens, widen

__all__ = ["NarrowPages", "NarrowPlan", "compact"]


@dataclass(frozen=True, eq=False)
class NarrowPages:
    """One layer. ``values`` [pages, page_size, 2, kv_heads, dim]; ``scales`` [pages, page_size, 2, kv_heads], each
    token's, or ``fixed``, or neither where 16 bits are kept."""

    values: Tensor
    scales: Tensor | None
    fixed: LayerScales | None

    def write(self, index: Tensor, keys_values: Tensor) -> None:
        """As ``Platform.write_cache``."""
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

    def widened(self, pages: Tensor, dtype: torch.dtype) -> Tensor:
        """What ``pages`` int64 hold: [pages, page_size, 2, kv_heads, dim]."""
        values = _bits(self.values).index_select(0, pages).view(self.values.dtype)
        scales = None if self.scales is None else self.scales.index_select(0, pages)
        return widen(values, scales, self.fixed, dtype)

    @property
    def _tokens(self) -> Tensor:
        return _bits(self.values).view(-1, *self.values.shape[2:])


@dataclass(frozen=True)
class NarrowPlan:
    """``plan``: over the ``pages`` int64 that a step reads, one after the other."""

    plan: AttentionPlan
    pages: Tensor


def compact(rows: AttentionRows, window: int, page_size: int) -> tuple[AttentionRows, Tensor]:
    """``rows`` over the pages that they read alone, each once, and these."""
    lengths, first = rows.starts + rows.counts, rows.starts.copy()
    if rows.tree is not None and rows.roots is not None:
        first[rows.decodes : rows.decodes + rows.verifies] = rows.roots
    column = np.arange(rows.pages.shape[1])
    read = column < -(-lengths // page_size)[:, None]
    if window:
        read &= column >= (np.maximum(first + 1 - window, 0) // page_size)[:, None]
    pages, place = np.unique(rows.pages[read], return_inverse=True)
    table = np.zeros_like(rows.pages)
    table[read] = place
    return replace(rows, pages=table), torch.from_numpy(pages.astype(np.int64))


def _bits(values: Tensor) -> Tensor:
    """Numbers of 8 bits as such that every operator copies."""
    return values.view(torch.int8) if values.element_size() == 1 else values
