"""What adapters add to a linear layer for prompts: the rows of a program mostly have one adapter.

The matrices of all places lie one after the other, so those in use among a program's rows are a range of lines. Both
kernels multiply this range as one matrix and keep what is of a row's own place: one adapter costs one step, and rows of
sixteen do not make a program take sixteen matrices in turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.devices.cuda.launch import multiprocessors, overlapping

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LowRankMany"]

_ROWS: Final = 64  # of a program of A
_LINES: Final = 64  # that a program of A multiplies at a time; more are taken in turn, or by other programs
_INPUTS: Final = 128  # of a step of A
_STAGES: Final = 3  # of A, 32 KiB each
_TEAMS: Final = 4  # programs of A which divide the lines in use among their rows
_MAX_SPLITS: Final = 16
_COUNTERS: Final = 1024  # more than blocks of rows whose inputs are divided
_TILE: Final = (128, 128, 4)  # rows, columns and warps of a program of B
_STEP: Final = 64  # lines of B at a time; fewer of one adapter of a lower rank


@triton.jit(do_not_specialize=["rows"])
def low_rank_many_down_kernel(
    x,
    places,
    down,
    low,
    parts,
    arrived,
    rows,
    stride,
    inputs,
    split,
    lines: tl.constexpr,
    row_block: tl.constexpr,
    line_block: tl.constexpr,
    block: tl.constexpr,
    stages: tl.constexpr,
    pdl: tl.constexpr,
):
    """``low`` [rows, lines]: ``x`` [rows, inputs], whose rows are ``stride`` apart, times the ``down``
    [places, lines, inputs] of each row's place; not written for place 0. A program takes ``split`` inputs; if that is
    not all, its sums are ``parts`` float32 [splits, rows, lines], and the last program of the rows adds them, in order.
    ``arrived`` int32: zeros, as they are left."""
    tile, part, team = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits, teams = tl.num_programs(1), tl.num_programs(2)
    row = tile * row_block + tl.arange(0, row_block)
    line = tl.arange(0, line_block)
    at = tl.arange(0, block)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.load(places + row, mask=row < rows, other=0).to(tl.int32)
    last = tl.max(place, 0)
    first = tl.min(tl.where(place > 0, place, last), 0) * lines
    end = (last + 1) * lines
    groups = tl.cdiv(end - first, line_block)
    known = (place > 0)[:, None]
    if (last > 0) & (team < groups):
        left = x + row[:, None].to(tl.int64) * stride
        for begin in range(first + team * line_block, end, teams * line_block):
            here = begin + line
            right = down + here[None, :].to(tl.int64) * inputs
            total = tl.zeros([row_block, line_block], tl.float32)
            for step in tl.range(part * split, tl.minimum(part * split + split, inputs), block, num_stages=stages):
                column = step + at
                inside = column < inputs
                a = tl.load(left + column[None, :], mask=known & inside[None, :], other=0.0)
                b = tl.load(right + column[:, None], mask=(here < end)[None, :] & inside[:, None], other=0.0)
                total = tl.dot(a, b, total)
            own = place[:, None] == (here // lines)[None, :]
            there = row[:, None] * lines + (here % lines)[None, :]
            if splits == 1:
                tl.store(low + there, total.to(low.dtype.element_ty), mask=own)
            else:
                tl.store(parts + part * rows * lines + there, total, mask=own)
        if splits > 1:
            tl.debug_barrier()
            if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits * tl.minimum(teams, groups) - 1:
                tl.debug_barrier()
                tl.store(arrived + tile, 0)
                for begin in range(0, lines, line_block):
                    here = begin + line
                    own = known & (here < lines)[None, :]
                    there = row[:, None] * lines + here[None, :]
                    total = tl.zeros([row_block, line_block], tl.float32)
                    for number in tl.range(0, splits, num_stages=1, loop_unroll_factor=4):
                        total += tl.load(
                            parts + number * rows * lines + there, mask=own, other=0.0, cache_modifier=".cg"
                        )
                    tl.store(low + there, total.to(low.dtype.element_ty), mask=own)


@triton.jit
def _add(
    total, low, up, place, row, column, inside, module, first, end, width,
    lines: tl.constexpr, rank: tl.constexpr, step: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """``total`` and, of each row, the lines ``first`` to ``end`` that are of its place: ``low`` times ``up``."""
    right = up + column[None, :].to(tl.int64) * width
    left = low + row[:, None] * lines + module * rank
    for begin in tl.range(first, end, step, num_stages=stages):
        line = begin + tl.arange(0, step)
        of_place = place[:, None] == (line // rank)[None, :]
        a = tl.load(left + (line % rank)[None, :], mask=of_place, other=0.0)
        b = tl.load(right + line[:, None], mask=(line < end)[:, None] & inside[None, :], other=0.0)
        total = tl.dot(a, b, total)
    return total


@triton.jit(do_not_specialize=["rows"])
def low_rank_many_up_kernel(
    low,
    places,
    up,
    tiles,
    out,
    rows,
    stride,
    eights,
    lines: tl.constexpr,
    rank: tl.constexpr,
    alone: tl.constexpr,
    step: tl.constexpr,
    row_block: tl.constexpr,
    block: tl.constexpr,
    unit: tl.constexpr,
    adds: tl.constexpr,
    pdl: tl.constexpr,
):
    """``out`` [rows, outputs], whose rows are ``stride`` apart: ``low`` [rows, lines] times ``up``
    [outputs, 8 * eights] of each row's place, ``rank`` numbers of a place; zeros for place 0. ``tiles`` int32
    [tiles, 3]: a tile's first column, the end of its module's, the module; columns are multiples of ``unit``.
    ``alone``, ``step``: lines at a time if a program's rows have one adapter, or several. ``adds``: to ``out``."""
    tile = tiles + tl.program_id(0) * 3
    begin, limit, module = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    column = tl.multiple_of(begin, unit) + tl.arange(0, block)
    inside = column < tl.multiple_of(limit, unit)
    row = tl.program_id(1) * row_block + tl.arange(0, row_block)
    width = eights * 8  # shows the compiler that rows begin at multiples of 16 bytes
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    known = (row < rows)[:, None] & inside[None, :]
    target = out + row[:, None].to(tl.int64) * stride + column[None, :]
    place = tl.load(places + row, mask=row < rows, other=0).to(tl.int32)
    last = tl.max(place, 0)
    first = tl.min(tl.where(place > 0, place, last), 0) * rank
    end = tl.where(last > 0, (last + 1) * rank, 0)
    if (last > 0) | (not adds):
        if adds:
            total = tl.load(target, mask=known, other=0.0).to(tl.float32)
        else:
            total = tl.zeros([row_block, block], tl.float32)
        if end - first == rank:
            total = _add(
                total, low, up, place, row, column, inside, module, first, end, width, lines, rank, alone, 1
            )  # fmt: skip
        else:
            total = _add(
                total, low, up, place, row, column, inside, module, first, end, width, lines, rank, step, 2
            )  # fmt: skip
        tl.store(target, total.to(out.dtype.element_ty), mask=known)


@dataclass(frozen=True, eq=False)
class LowRankMany:
    """What adapters add to a layer for many tokens. down [places, modules * rank, inputs]; up [outputs, width], the
    numbers of all places next to each other; columns: of the modules. 16 bits."""

    down: Tensor
    up: Tensor
    rank: int
    tiles: Tensor
    arrived: Tensor
    unit: int  # of which all modules' columns are multiples

    @staticmethod
    def of(down: Tensor, up: Tensor, columns: Sequence[tuple[int, int]], rank: int) -> LowRankMany:
        tiles = [
            (column, end, module)
            for module, (begin, end) in enumerate(columns)
            for column in range(begin, end, _TILE[1])
        ]
        held = torch.tensor(tiles, dtype=torch.int32, device=down.device)
        arrived = torch.zeros(_COUNTERS, dtype=torch.int32, device=down.device)
        return LowRankMany(down, up, rank, held, arrived, gcd(_TILE[1], *(end for _, end in columns)))

    def add(self, x: Tensor, places: Tensor, out: Tensor, *, adds: bool) -> Tensor:
        """What adapters at ``places`` int64 [rows] add for ``x`` [rows, inputs], into ``out`` [rows, outputs], or added
        to it."""
        return self._expand(self._shrink(x, places), places, out, adds)

    def _shrink(self, x: Tensor, places: Tensor) -> Tensor:
        """A times ``x`` [rows, inputs] -> [rows, modules * rank]; rows of place 0 are not written."""
        (rows, inputs), (most, lines) = x.shape, self.down.shape[:2]
        x = x if x.stride(1) == 1 else x.contiguous()
        blocks = triton.cdiv(rows, _ROWS)
        splits = max(1, min(_MAX_SPLITS, multiprocessors(x.device) // blocks, inputs // (2 * _INPUTS)))
        split = triton.cdiv(triton.cdiv(inputs, splits), _INPUTS) * _INPUTS
        splits = triton.cdiv(inputs, split)
        low = x.new_empty((rows, lines))
        parts = low if splits == 1 else torch.empty((splits, rows, lines), dtype=torch.float32, device=x.device)
        pdl, teams = overlapping(x.device), min(_TEAMS, triton.cdiv((most - 1) * lines, _LINES))
        low_rank_many_down_kernel[(blocks, splits, teams)](
            x, places, self.down, low, parts, self.arrived, rows, x.stride(0), inputs, split,
            lines, _ROWS, _LINES, _INPUTS, _STAGES, pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
        return low

    def _expand(self, low: Tensor, places: Tensor, out: Tensor, adds: bool) -> Tensor:
        """B times ``low`` into ``out`` [rows, outputs], or added to it."""
        (rows, lines), rank, pdl = low.shape, self.rank, overlapping(out.device)
        row_block, columns, warps = _TILE
        alone = min(_STEP, max(16, triton.next_power_of_2(rank)))
        low_rank_many_up_kernel[(len(self.tiles), triton.cdiv(rows, row_block))](
            low, places, self.up, self.tiles, out, rows, out.stride(0), self.up.stride(0) // 8,
            lines, rank, alone, _STEP, row_block, columns, self.unit, adds, pdl, num_warps=warps, launch_pdl=pdl,
        )  # fmt: skip
        return out
