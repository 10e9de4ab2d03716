"""Prompts over a latent cache: keys and values of all heads are made of the latent vectors first, where that takes less
time than attention in the latent space (``kernels.devices.cuda.attention.latent``).

With DeepSeek's sizes a query and a token take 2 * 512 + 64 products of numbers in the latent space, and 128 + 64 + 128
with keys and values, which take 512 * (128 + 128) to make. Some rows, and some of their heads, are attended to at a
time: what they need is bounded, and every step allocates as much, so that a step at load measures it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.devices.cuda.attention.decode import DecodeScratch
from kernels.devices.cuda.attention.latent import LINES, attend_latent
from kernels.devices.cuda.attention.plan import AttentionPlan
from kernels.devices.cuda.attention.prefill import TILE, order_blocks
from kernels.devices.cuda.launch import attempted, copying, has_gluon, is_precompiling, multiprocessors
from kernels.devices.latent_attention import LatentHeads

__all__ = ["LatentPlan", "MadeRows", "attend_latent_rows", "gather", "makes_keys", "plan_latent"]

_BLOCK = 128  # tokens of the attention kernel's product
_GATHERED = 32  # tokens of a program
_MAX_NUMBERS = 1 << 27  # of keys and values that are made at a time
_MAX_LINES = 1 << 18  # tokens that are gathered at a time; a longer row stays in the latent space
_FASTER, _MAKING = 2.0, 1.5
"""How many times the products a second attention to keys and values takes, and making them, of those of attention in
the latent space (H100)."""

_ready: set[tuple[torch.device, torch.dtype, int]] = set()
"""Devices, dtypes and heads whose kernels are compiled."""


@dataclass(frozen=True)
class MadeRows:
    """Rows whose keys and values are made. ``blocks`` int32 [blocks, 4]: as those of ``PrefillBlocks``. ``pages`` int32
    [rows, columns]. ``lines`` int32 [n, 3]: row, first position and end of the row of ``_BLOCK`` tokens each, as they
    are gathered; row r begins at line ``bases[r]`` (int32 [rows])."""

    blocks: Tensor
    pages: Tensor
    lines: Tensor
    bases: Tensor


@dataclass(frozen=True)
class LatentPlan:
    """How the rows of the plan ``step`` are attended to: those of ``latent`` in the latent space, whose queries are
    before ``end``, and those of each of ``made`` one after the other."""

    step: AttentionPlan
    latent: AttentionPlan
    end: int
    made: tuple[MadeRows, ...] = ()


def plan_latent(
    step: AttentionPlan, heads: LatentHeads, rope: int, put: Callable[[npt.NDArray[np.int32]], Tensor]
) -> LatentPlan:
    """``rope``: numbers of the rotated part of a key. ``put``: copies an array to the device.

    A row is attended to in the form that should take less time, by the products of each and by the share of the
    multiprocessors that the queries of all rows fill. In the latent space a program has all tokens of some queries.
    """
    rows, prefills = step.rows, step.prefills
    whole = LatentPlan(step, step, 1 << 62)
    if rows is None or prefills is None:
        return whole
    first = rows.decodes + rows.verifies
    counts, ends = rows.counts[first:], rows.starts[first:] + rows.counts[first:]
    (count, plain, rank), value = heads.keys.shape, heads.values.shape[2]
    seen, making = ends - counts / 2, rank * (plain + value) / _MAKING
    padded, tiles = -(-ends // _BLOCK) * _BLOCK, -(-counts // TILE)
    programs = multiprocessors(prefills.blocks.device)
    filled = min(1.0, float((-(-counts * count // LINES)).sum()) / programs)
    in_space = counts * (seen * (2 * rank + rope) / filled + making)
    at_once = np.minimum(float(tiles.sum()) * count, tiles * (_MAX_NUMBERS / (padded * (plain + value))))
    made = tiles * TILE * seen * (plain + rope + value) / (_FASTER * np.minimum(1.0, at_once / programs))
    made += padded * making
    many = (made < in_space) & (padded <= _MAX_LINES)
    if not many.any():
        return whole
    blocks = order_blocks(rows, first)
    latent, end = replace(step, prefills=None), int(rows.counts[:first].sum())
    if not many.all():
        others = replace(prefills, blocks=put(blocks[~many[blocks[:, 0]]]))
        latent, end = replace(step, prefills=others), whole.end
    groups: list[list[int]] = []
    lines = 0  # of the last group
    for row in np.flatnonzero(many).tolist():
        if not groups or lines + int(padded[row]) > _MAX_LINES:
            groups.append([])
            lines = 0
        groups[-1].append(row)
        lines += int(padded[row])
    return LatentPlan(
        step,
        latent,
        end,
        tuple(
            _made_rows(np.array(own), ends, blocks[np.isin(blocks[:, 0], own)], prefills.pages, put) for own in groups
        ),
    )


def _made_rows(
    own: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    blocks: npt.NDArray[np.int32],
    pages: Tensor,
    put: Callable[[npt.NDArray[np.int32]], Tensor],
) -> MadeRows:
    """``own``: the rows, of those that end at ``ends``; ``blocks``: theirs."""
    each = -(-ends[own] // _BLOCK)
    before = np.cumsum(each) - each
    bases = np.zeros(len(ends), dtype=np.int32)
    bases[own] = before * _BLOCK
    row = np.repeat(own, each)
    at = (np.arange(len(row)) - np.repeat(before, each)) * _BLOCK
    lines = np.stack((row, at, ends[row]), axis=1).astype(np.int32)
    return MadeRows(put(blocks), pages, put(lines), put(bases))


@triton.jit(do_not_specialize=["page_stride"])
def gather_latent_kernel(
    cache,
    pages,
    lines,
    latent,
    rotated,
    page_stride,
    page_size: tl.constexpr,
    rank: tl.constexpr,
    rank_block: tl.constexpr,
    rope: tl.constexpr,
    rope_block: tl.constexpr,
    each: tl.constexpr,
    parts: tl.constexpr,
):
    """Copy ``each`` tokens, a part of a block of ``lines``; lines behind the end of a row are 0."""
    block, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    row = tl.load(lines + block * 3).to(tl.int64)
    position = tl.load(lines + block * 3 + 1) + part * each + tl.arange(0, each)
    there = position < tl.load(lines + block * 3 + 2)
    page = tl.load(pages + row * page_stride + position // page_size, mask=there, other=0).to(tl.int64)
    source = cache + ((page * page_size + position % page_size) * (rank + rope))[:, None]
    line = (tl.program_id(0) * each + tl.arange(0, each)).to(tl.int64)
    at = tl.arange(0, rank_block)
    rope_at = tl.arange(0, rope_block)
    plain = tl.load(source + at[None, :], mask=there[:, None] & (at < rank)[None, :], other=0.0)
    tl.store(latent + line[:, None] * rank + at[None, :], plain, mask=(at < rank)[None, :])
    mask = there[:, None] & (rope_at < rope)[None, :]
    turned = tl.load(source + rank + rope_at[None, :], mask=mask, other=0.0)
    tl.store(rotated + line[:, None] * rope + rope_at[None, :], turned, mask=(rope_at < rope)[None, :])


def gather(cache: Tensor, rows: MadeRows, rank: int) -> tuple[Tensor, Tensor]:
    """The vectors of ``cache`` [pages, page_size, rank + rope_dim] in lines: [lines, rank] and [lines, rope_dim]."""
    _, page_size, width = cache.shape
    lines, rope, parts = len(rows.lines) * _BLOCK, width - rank, _BLOCK // _GATHERED
    latent, rotated = (cache.new_empty(max(lines, _MAX_LINES), numbers)[:lines] for numbers in (rank, rope))
    gather_latent_kernel[(len(rows.lines) * parts,)](
        cache,
        rows.pages,
        rows.lines,
        latent,
        rotated,
        rows.pages.stride(0),
        page_size,
        rank,
        triton.next_power_of_2(rank),
        rope,
        triton.next_power_of_2(rope),
        _GATHERED,
        parts,
        num_warps=4,
    )
    return latent, rotated


def makes_keys(queries: Tensor, cache: Tensor, heads: LatentHeads) -> bool:
    """Whether there is a kernel for keys and values that are made."""
    _, plain, rank = heads.keys.shape
    return (
        queries.element_size() == 2
        and queries.dtype == cache.dtype
        and queries.stride(0) % 8 == 0
        and queries.data_ptr() % 16 == 0
        and plain == heads.values.shape[2] == 128
        and cache.shape[2] - rank == 64
        and copying(queries.device)
        and has_gluon("attention.prefill_warp_specialized")
    )


def attend_latent_rows(
    queries: Tensor, cache: Tensor, plan: LatentPlan, heads: LatentHeads, scale: float, scratch: DecodeScratch
) -> Tensor:
    """Causal attention of ``queries`` [tokens, heads, plain_dim + rope_dim] over ``cache`` [pages, page_size, rank +
    rope_dim] -> [tokens, heads, value_dim]."""

    def attend_in_space(some: Tensor, step: AttentionPlan) -> Tensor:
        plain, rotated = heads.absorb(some)
        return heads.expand(attend_latent(plain, rotated, cache, step, scale, scratch))

    if not plan.made:
        return attend_in_space(queries, plan.step)
    out = queries.new_empty(*queries.shape[:2], heads.values.shape[2])
    if plan.end:
        out[: plan.end] = attend_in_space(queries[: plan.end], plan.latent)
    if attempted(_attend_made, queries, cache, plan.made, heads, scale, out) is None:
        return attend_in_space(queries, plan.step)
    return out


def _attend_made(
    queries: Tensor, cache: Tensor, groups: tuple[MadeRows, ...], heads: LatentHeads, scale: float, out: Tensor
) -> Tensor:
    from kernels.devices.cuda.attention.prefill_warp_specialized import attend_made

    count, dim = queries.shape[1], out.shape[2]
    room = queries.new_empty(max(_MAX_NUMBERS, 2 * count * _BLOCK * dim))

    def view(number: int, lines: int) -> Tensor:
        return room[: 2 * number * lines * dim].view(2, number, lines, dim)

    def compile_all(rows: MadeRows, rotated: Tensor) -> None:
        """A kernel for each number of heads, launched for a block without queries."""
        none = rows.blocks.new_zeros(1, 4)
        for size in _head_counts(count, dim):
            both = view(size, _BLOCK)
            attend_made(queries[:, :size], both, rotated[:_BLOCK], rows.bases, none, scale, out[:, :size])

    def attend(rows: MadeRows) -> None:
        latent, rotated = gather(cache, rows, heads.rank)
        kind = queries.device, queries.dtype, count
        if kind not in _ready or is_precompiling():
            compile_all(rows, rotated)
            _ready.add(kind)
        lines = len(latent)
        size = _heads_at_once(count, _MAX_NUMBERS // (2 * lines * dim))
        for first in range(0, count, size):
            some = slice(first, first + size)
            both, each = view(size, lines), latent.expand(size, -1, -1)
            torch.bmm(each, heads.keys[some].transpose(1, 2), out=both[0])
            torch.bmm(each, heads.values[some], out=both[1])
            attend_made(queries[:, some], both, rotated, rows.bases, rows.blocks, scale, out[:, some])

    for rows in groups:
        attend(rows)  # which releases what it has gathered
    return out


def _heads_at_once(count: int, most: int) -> int:
    """At most ``most`` of ``count`` heads, in equal parts: all, or a power of two."""
    return count if count <= most else min(count & -count, 1 << (most.bit_length() - 1))


def _head_counts(count: int, dim: int) -> set[int]:
    """All results of ``_heads_at_once``."""
    least = _MAX_NUMBERS // (2 * _MAX_LINES * dim)
    return {_heads_at_once(count, most) for most in range(min(least, count), count + 1)}
