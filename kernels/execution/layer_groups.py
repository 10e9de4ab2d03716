"""The cache groups of a loaded model: the caches of its layers, and their part of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.contract.caches import CacheGroup, CacheSpec, GroupPages, Latent, Paged, State, Window
from kernels.contract.errors import ConfigError
from kernels.core.arrays import Ints, Longs
from kernels.core.attention_rows import AttentionRows
from kernels.core.batch import BoundedRows, ForwardBatch, VerifyingRows
from kernels.devices.base import Device
from kernels.devices.group_caches import make_group
from kernels.devices.latent_cache import clear_latent
from kernels.devices.state_cache import plan_segments, verify_segments
from kernels.state.bounded_tables import BoundedTable
from kernels.weights.quantization.cache import LayerScales

__all__ = ["LayerGroups", "check_groups"]


def check_groups(groups: Sequence[CacheGroup], layers: int) -> None:
    """Raises ConfigError for a layer that the model has not, and for two groups with the same spec."""
    named = sorted({layer for group in groups for layer in group.layers})
    if not named or named[0] < 0 or named[-1] >= layers:
        raise ConfigError(f"the cache groups hold layers {named}, and the model has layers 0 to {layers - 1}")
    if len({group.spec for group in groups}) < len(groups):
        raise ConfigError("two cache groups have the same spec; make one of them")


class LayerGroups:
    """``groups`` with their pages on a device. ``page_size``: tokens of a main page.

    ``is_plain``: all groups share the main page table and its plans, and their steps need nothing from here.
    ``is_captured``: passes over them can be captured. ``has_latent``: some keep latent vectors.
    ``caches``: of each of ``layers``; a tuple where it is in several groups, in their order; None where it is in none.
    ``shared``: layers that read another's cache, which stands before what they have of their own.
    Raises UnsupportedError.
    """

    def __init__(
        self,
        device: Device,
        groups: tuple[GroupPages, ...],
        page_size: int,
        dtype: torch.dtype,
        scales: Sequence[LayerScales] | None = None,
        layers: int = 0,
        *,
        shared: Mapping[int, int] | None = None,
    ) -> None:
        self._device, self._page_size = device, page_size
        self.groups = groups
        self.bounded = tuple(group for group in groups if group.bounded)
        planned = device.attention.plans_latent and all(
            device.cache.plans_latent(group.group.spec, page_size, dtype)
            for group in groups
            if isinstance(group.group.spec, Latent)
        )
        self._planned = (Paged, Latent) if planned else (Paged,)
        self.is_plain = all(isinstance(group.group.spec, self._planned) for group in groups)
        self.has_latent = any(isinstance(group.group.spec, Latent) for group in groups)
        kinds = ((Window, device.capture.holds_windows), (State, device.capture.holds_states))
        captured = (*self._planned, *(kind for kind, holds in kinds if holds))
        self.is_captured = all(isinstance(group.group.spec, captured) for group in groups)
        held = [layer for group in groups for layer in group.group.layers]
        by_layer: list[list[Any]] = [[] for _ in range(max(layers, 1 + max(held, default=-1)))]
        self._group_caches: list[list[Any]] = []
        for group in groups:
            made = make_group(device, group, page_size, dtype, scales)
            self._group_caches.append(made)
            for layer, cache in zip(group.group.layers, made, strict=True):
                by_layer[layer].append(cache)
        self.caches: list[Any] = [tuple(caches) if len(caches) > 1 else next(iter(caches), None) for caches in by_layer]
        for layer, source in (shared or {}).items():
            read, written = self.caches[source], self.caches[layer]
            self.caches[layer] = read if written is None else (read, written)

    def windows(self, windows: frozenset[int]) -> frozenset[int]:
        """The ``windows`` of the model that need a plan over the main pages."""
        bounded = {group.group.spec.length for group in self.bounded if isinstance(group.group.spec, Window)}
        return (
            windows - bounded
            if any(isinstance(group.group.spec, self._planned) for group in self.groups)
            else frozenset()
        )

    def place(
        self, batch: ForwardBatch, rows: AttentionRows, slots: Longs, tables: Sequence[BoundedTable]
    ) -> ForwardBatch:
        """The batch with the rows of every bounded group. ``rows`` belong to ``slots``; ``tables``: of these groups."""
        return self._with_pages(batch, rows, [table.rows(slots, rows.starts, rows.counts) for table in tables])

    def place_null(self, batch: ForwardBatch, rows: AttentionRows, verified: int = 0) -> ForwardBatch:
        """``place`` for rows without a request, whose bounded pages are the null page. ``verified``: tokens that layers
        with states record as if they were draft tokens."""
        lengths = rows.starts + rows.counts
        result = self._with_pages(
            batch,
            rows,
            [
                np.zeros((len(lengths), -(-int(lengths.max()) // group.page_tokens)), dtype=np.int32)
                for group in self.bounded
            ],
        )
        if not verified:
            return result
        recording = VerifyingRows(slice(0, 0), slice(0, verified))
        bounded = {
            spec: dataclasses.replace(each, verifying=recording) if isinstance(spec, State) else each
            for spec, each in result.bounded.items()
        }
        return dataclasses.replace(result, bounded=bounded)

    def clear(self, pages: list[int]) -> None:
        """Zero these main pages."""
        for group, caches in zip(self.groups, self._group_caches, strict=True):
            if isinstance(group.group.spec, Paged):
                self._device.cache.clear(caches, pages)
            elif isinstance(group.group.spec, Latent):
                clear_latent(caches, pages)

    def clear_bounded(self, index: int, pages: list[int]) -> None:
        """Zero these pages of bounded group ``index``. A state that a row does not own is never read."""
        group = self.bounded[index]
        if isinstance(group.group.spec, Window):
            self._device.cache.clear(self._group_caches[self.groups.index(group)], pages)

    def _with_pages(self, batch: ForwardBatch, rows: AttentionRows, pages: Sequence[Ints]) -> ForwardBatch:
        bounded: Mapping[CacheSpec, BoundedRows] = {
            group.group.spec: self._rows(group, rows, table) for group, table in zip(self.bounded, pages, strict=True)
        }
        return dataclasses.replace(batch, rows=rows, bounded=bounded)

    def _rows(self, group: GroupPages, rows: AttentionRows, pages: Ints) -> BoundedRows:
        size, spec = group.page_tokens, group.group.spec
        if not isinstance(spec, Window):
            return _state_rows(rows, pages, size, self._device.memory.put)
        row = np.repeat(np.arange(len(rows.starts)), rows.counts)
        offsets = np.cumsum(rows.counts) - rows.counts
        positions = np.arange(len(row)) + np.repeat(rows.starts - offsets, rows.counts)
        index = pages[row, positions // size] * np.int64(size) + positions % size
        group_rows = AttentionRows(rows.starts, rows.counts, pages, rows.decodes)
        plan = self._device.attention.plan_layers(group_rows, spec.length)
        return BoundedRows(rows.starts, rows.counts, pages, size, self._device.memory.put(index), plan)


def _state_rows(rows: AttentionRows, pages: Ints, page_tokens: int, put: Callable[[Longs], Tensor]) -> BoundedRows:
    """The rows of a group of states."""
    starts, counts = rows.starts, rows.counts
    if not rows.verifies:
        segments = plan_segments(starts, counts, pages, page_tokens, put)
        return BoundedRows(starts, counts, pages, page_tokens, segments=segments)
    part = slice(rows.decodes, rows.decodes + rows.verifies)
    offsets = np.cumsum(counts) - counts
    first = int(offsets[part.start])
    tokens = slice(first, first + int(counts[part].sum()))
    others = np.r_[: part.start, part.stop : len(counts)]
    segments = (
        *plan_segments(starts[others], counts[others], pages[others], page_tokens, put, offsets[others]),
        *verify_segments(starts[part], counts[part], pages[part], page_tokens, put, first),
    )
    return BoundedRows(starts, counts, pages, page_tokens, segments=segments, verifying=VerifyingRows(part, tokens))
