"""Whole steps of decodes in CUDA graphs: a small copy as input, one graph, and its tokens copied to the host.

The input of a step describes its rows: slots, lengths, pages. The graph finds their tokens in the table by slot, runs
the model and its output layer, and writes the argmax tokens back to the table, where the next step finds them. Rows
with other sampling overwrite their tokens: a step also returns the logits. It increments the lengths of its rows, so
that nothing is copied if the next step has the same rows and pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.contract.caches import CacheSpec, Window
from kernels.core.attention_rows import StepTokens
from kernels.core.batch import BoundedRows, ForwardBatch
from kernels.devices.capture import StepCaptureRequest
from kernels.devices.cuda.attention.decode import LAUNCHED, split_count
from kernels.devices.cuda.attention.plan import AttentionPlan, DecodeRows
from kernels.devices.cuda.elementwise.sampling import best_of, find_largest
from kernels.devices.cuda.graphs.arrivals import ArrivalRing
from kernels.devices.cuda.graphs.decode_graphs import capture_each
from kernels.devices.cuda.launch import overlapping
from kernels.devices.graphs import Put
from kernels.devices.prepared import CapturedStepResult
from kernels.devices.state_cache import captured_segments

__all__ = ["StepGraphs", "enter", "leave"]

_HEADER = 3
"""Numbers of a row before its pages: its slot, whether it grows, and its tokens in the cache."""
_BLOCK = 64


@triton.jit(do_not_specialize=["rows", "state_stride", "table_stride", "pages_stride", "group_stride"])
def step_begin_kernel(
    state,
    table,
    tokens,
    positions,
    index,
    place,
    pages,
    rows,
    state_stride,
    table_stride,
    pages_stride,
    group_stride,
    index_stride,
    groups: tl.constexpr,
    header: tl.constexpr,
    page_size: tl.constexpr,
    places: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    """Write each row's last token, its position and its places in the caches, and the step's place in the ring.
    ``groups`` caches have ``pages`` of their own."""
    row = tl.program_id(0) * block + tl.arange(0, block)
    there = row < rows
    own = state + row.to(tl.int64) * state_stride
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(own, mask=there, other=0).to(tl.int64)
    position = tl.load(own + 2, mask=there, other=1) - 1
    page = tl.load(own + header + position // page_size, mask=there, other=0).to(tl.int64)
    tl.store(tokens + row, tl.load(table + slot * table_stride + position, mask=there, other=0), mask=there)
    tl.store(positions + row, position.to(tl.int64), mask=there)
    tl.store(index + row, page * page_size + position % page_size, mask=there)
    for group in tl.static_range(groups):
        column = group * group_stride + row.to(tl.int64) * pages_stride + position // page_size
        page = tl.load(pages + column, mask=there, other=0).to(tl.int64)
        tl.store(index + (1 + group) * index_stride + row, page * page_size + position % page_size, mask=there)
    if tl.program_id(0) == 0:
        tl.store(place, (tl.load(place) + 1) % places)


@triton.jit(do_not_specialize=["state_stride", "table_stride", "ring_stride"])
def step_end_kernel(
    state,
    table,
    values,
    ids,
    found,
    ring,
    place,
    parts,
    state_stride,
    table_stride,
    ring_stride,
    block: tl.constexpr,
    brings: tl.constexpr,
    pdl: tl.constexpr,
):
    """Write the next token of a growing row to the table and count it; those of other rows go to row 0. ``brings``:
    also write to the ring."""
    row = tl.program_id(0).to(tl.int64)
    own = state + row * state_stride
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    token, fails = best_of(values, ids, row, parts, block)
    grows = tl.load(own + 1)
    slot = (tl.load(own) * grows).to(tl.int64)
    length = tl.load(own + 2)
    reported = tl.where(fails, -1, token)
    if brings:
        tl.store(ring + tl.load(place).to(tl.int64) * ring_stride + row, reported)
    tl.store(table + slot * table_stride + length, token)
    tl.store(found + row, reported)
    tl.store(own + 2, length + grows)


def enter(
    state: Tensor,
    table: Tensor,
    page_size: int,
    tokens: Tensor,
    positions: Tensor,
    index: Tensor,
    arrivals: ArrivalRing,
    pages: Tensor | None = None,
) -> None:
    """``state`` int32 [rows, 3 + columns]; ``table`` int32 [slots, positions]. ``tokens`` int32 [rows], ``positions``
    int64 [rows] and ``index`` int64 [1 + groups, rows] are written: see ``ForwardBatch``. The step's place of
    ``arrivals`` is the next one from here on. ``pages`` int32 [groups, rows, columns]: of other page tables.
    """
    rows, pdl = len(state), overlapping(state.device)
    step_begin_kernel[(triton.cdiv(rows, _BLOCK),)](
        state,
        table,
        tokens,
        positions,
        index,
        arrivals.place,
        state if pages is None else pages,
        rows,
        state.stride(0),
        table.stride(0),
        0 if pages is None else pages.stride(1),
        0 if pages is None else pages.stride(0),
        index.stride(0),
        0 if pages is None else len(pages),
        _HEADER,
        page_size,
        len(arrivals.memory),
        _BLOCK,
        pdl,
        num_warps=2,
        launch_pdl=pdl,
    )


def leave(
    state: Tensor, table: Tensor, logits: Tensor, kept: Tensor, found: Tensor, arrivals: ArrivalRing | None = None
) -> None:
    """The most likely tokens of ``logits`` [rows, vocab] to ``found`` int32 [rows], -1 where ``argmax`` says that a
    row fails, to the step's place of ``arrivals``, and to the table; the logits to ``kept``, as large and dense. A row
    that grows has a token more in ``state`` then.
    """
    values, ids = find_largest(logits.contiguous(), kept)
    (rows, parts), pdl = values.shape, overlapping(state.device)
    step_end_kernel[(rows,)](
        state,
        table,
        values,
        ids,
        found,
        found if arrivals is None else arrivals.memory,
        found if arrivals is None else arrivals.place,
        parts,
        state.stride(0),
        table.stride(0),
        0 if arrivals is None else arrivals.memory.stride(0),
        triton.next_power_of_2(parts),
        arrivals is not None,
        pdl,
        num_warps=1,
        launch_pdl=pdl,
    )


@dataclass(frozen=True)
class _Step:
    replay: Callable[[], None]
    found: CapturedStepResult


class StepGraphs:
    """Captures steps of ``sizes`` rows, the largest first. ``columns``: most pages of a sequence. ``padded``: whether a
    step may use a graph of a larger batch. For the rest see ``StepCaptureRequest``.
    """

    def __init__(
        self,
        request: StepCaptureRequest,
        sizes: Sequence[int],
        kv_heads: int,
        page_size: int,
        padded: bool,
        put: Put,
    ) -> None:
        rows, columns, device = max(sizes), request.columns, request.table.device
        self._forward, self._table, self._windows = request.forward, request.table, request.windows
        self._kv_heads, self._page_size, self._padded, self._put = kv_heads, page_size, padded, put
        self._state = torch.zeros((rows, _HEADER + columns), dtype=torch.int32, device=device)
        self._state[:, 2] = 1  # a token in the cache
        self._held = np.full(self._state.shape, -1, dtype=np.int32)  # what the device has, once it was brought
        self._tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._bounded = request.bounded
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._index = torch.zeros((1 + len(self._bounded), rows), dtype=torch.int64, device=device)
        self._pages = torch.zeros((len(self._bounded), rows, columns), dtype=torch.int32, device=device)
        self._held_pages = np.full(self._pages.shape, -1, dtype=np.int32)
        self._logits: Tensor | None = None
        self._arrivals = ArrivalRing(rows, device)
        captured = capture_each(sorted(sizes, reverse=True), self._run, device, lambda could: could)
        self._steps = {size: _Step(replay, result) for size, (replay, result) in captured.items()}
        self.sizes = sorted(self._steps)
        self._arrivals.begin()

    def run(self, given: StepTokens) -> CapturedStepResult | None:
        """Run the step; None if no graph fits it."""
        count = len(given.slots)
        size = next((size for size in self.sizes if size >= count), 0)
        if not size or (size > count and not self._padded):
            return None
        state = np.zeros((size, _HEADER + given.pages.shape[1]), dtype=np.int32)
        state[count:, 2] = 1  # padding rows attend to a token of the null page
        state[:count, 0], state[:count, 1], state[:count, 2] = given.slots, given.grows, given.lengths
        state[:count, _HEADER:] = given.pages
        self._stage(state)
        if given.bounded:
            self._stage_pages(given, size)
        self._arrivals.clear()
        step = self._steps[size]
        step.replay()
        arrives, result = self._arrivals.follow(count), step.found
        return CapturedStepResult(result.hidden[:count], result.logits[:count], result.argmax[:count], arrives)

    def _stage(self, state: npt.NDArray[np.int32]) -> None:
        """``state`` to the device, unless it is what the step before has left there: most steps are of the rows of the
        one before, and of no page more."""
        rows, columns = state.shape
        held = self._held[:rows, :columns]
        if not np.array_equal(held, state):
            self._state[:rows, :columns].copy_(self._put(state))
            held[:] = state
        held[:, 2] += held[:, 1]

    def _stage_pages(self, given: StepTokens, size: int) -> None:
        """The pages of other tables to the device, unless it has them."""
        columns = given.pages.shape[1]
        pages = np.zeros((len(given.bounded), size, columns), dtype=np.int32)
        for group, own in zip(pages, given.bounded, strict=True):
            group[: len(own), : own.shape[1]] = own
        held = self._held_pages[:, :size, :columns]
        if not np.array_equal(held, pages):
            self._pages[:, :size, :columns].copy_(self._put(pages))
            held[:] = pages

    def _run(self, size: int) -> CapturedStepResult:
        state, context = self._state[:size], (self._state.shape[1] - _HEADER) * self._page_size
        tokens, positions, index = self._tokens[:size], self._positions[:size], self._index[:, :size]
        pages = self._pages[:, :size] if self._bounded else None
        enter(state, self._table, self._page_size, tokens, positions, index, self._arrivals, pages)
        decodes = DecodeRows(state[:, 2:], split_count(size, self._kv_heads, max(context, LAUNCHED)))
        plans = {window: AttentionPlan(decodes, None, window) for window in self._windows}
        bounded: dict[CacheSpec, BoundedRows] = {}
        for number, group in enumerate(self._bounded):
            spec, own = group.group.spec, self._pages[number, :size]
            if isinstance(spec, Window):
                plan = AttentionPlan(replace(decodes, own_pages=own), None, spec.length)
                bounded[spec] = BoundedRows.captured(self._page_size, index[1 + number], plan)
            else:
                segments = captured_segments(own, positions, group.page_tokens)
                bounded[spec] = BoundedRows.captured(group.page_tokens, segments=segments)
        hidden, logits = self._forward(ForwardBatch(tokens, positions, index[0], plans, bounded=bounded), None)
        result = torch.empty(size, dtype=torch.int32, device=state.device)
        if self._logits is None:  # the largest step comes first
            self._logits = logits.new_empty(logits.shape)
        # In a place that all graphs share: what each keeps of its own, no other can use.
        kept = self._logits[:size]
        leave(state, self._table, logits, kept, result, self._arrivals)
        return CapturedStepResult(hidden, kept, result)
