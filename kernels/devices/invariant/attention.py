"""Attention of each query over blocks of keys that begin at fixed positions, added up from the first to the last.

A unit is up to a few queries that follow one another in a row, or one query of a draft tree. Its products with a block
of keys always have the same shape. A block of which a query sees nothing adds zeros to its sums. The keys on the path
of a query in a tree are read as if they followed one another, as they will when they are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.core.arrays import Longs
from kernels.core.attention_rows import AttentionRows
from kernels.devices.invariant.elementwise import by_lines, pairwise_sum
from kernels.devices.invariant.matmul import rows_alike

__all__ = ["InvariantPlan", "attend"]

_KEYS: Final = 128
"""Positions of a block."""
_LINES: Final = 16
"""Lines of a product are a multiple of so many. A line is a query of one head."""
_NUMBERS: Final = 1 << 22
"""Keys, values and scores that are held at once, about; a unit's at least."""

Read = Callable[[Tensor], Tensor]
"""Places in the cache int64 [n] -> their keys and values [n, 2, kv_heads, dim], floats of any size."""
Put = Callable[[npt.NDArray[np.int64] | npt.NDArray[np.bool_]], Tensor]
"""How an array gets to the device."""


@dataclass(frozen=True)
class _Unit:
    """``tokens`` of the step and their positions ``at``; ``blocks``: (number of the block, its places in the cache)."""

    tokens: Longs
    at: Longs
    blocks: Sequence[tuple[int, Longs]]


@dataclass(frozen=True)
class _Group:
    """Units that run together. ``query_tokens`` int64 [units * queries]: tokens of the step. ``found`` int64 [n]:
    where among these the tokens ``to`` int64 [n] stand. ``places`` int64 [blocks * keys] of the cache. ``pairs``:
    (unit, block). ``units`` int64 [pairs]: the unit of each. ``hidden`` bool [pairs, 1, queries, 1, keys]. ``turns``:
    pairs int64 [m] and units int64 [m] of the first block of each unit, then of the second, and so on.
    """

    query_tokens: Tensor
    found: Tensor
    to: Tensor
    places: Tensor
    pairs: Sequence[tuple[int, int]]
    units: Tensor
    hidden: Tensor
    turns: Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class InvariantPlan:
    """The plan of a step's ``rows``. ``window``: tokens that a query sees, 0 for all."""

    rows: AttentionRows
    window: int
    page_size: int
    put: Put
    _groups: dict[tuple[int, int], list[_Group]] = field(default_factory=dict)

    def groups(self, queries: int, numbers: int) -> list[_Group]:
        """Units of up to ``queries`` queries. ``numbers``: of a block's keys and values, or scores."""
        result = self._groups.get((queries, numbers))
        if result is None:
            result = self._groups[queries, numbers] = self._grouped(queries, max(1, _NUMBERS // numbers))
        return result

    def _grouped(self, queries: int, query_count: int) -> list[_Group]:
        groups: list[_Group] = []
        units: list[_Unit] = []
        blocks = 0
        for unit in self._units(queries):
            if units and blocks + len(unit.blocks) > query_count:
                groups.append(self._group(units, queries))
                units, blocks = [], 0
            units.append(unit)
            blocks += len(unit.blocks)
        return [*groups, self._group(units, queries)] if units else groups

    def _units(self, queries: int) -> Sequence[_Unit]:
        rows, units, token = self.rows, [], 0
        tree = None if rows.tree is None else rows.tree.cpu().numpy()
        for row, (start, count) in enumerate(zip(rows.starts.tolist(), rows.counts.tolist(), strict=True)):
            draft = row - rows.decodes
            if tree is not None and 0 <= draft < rows.verifies:
                root = start if rows.roots is None else int(rows.roots[draft])
                units += self._of_tree(row, root, token, tree[draft, :count])
            else:
                units += self._of_chain(row, start, count, token, queries)
            token += count
        return units

    def _of_chain(self, row: int, start: int, count: int, token: int, queries: int) -> list[_Unit]:
        end, kept = start + count, self._first(start)
        blocks: dict[int, tuple[int, Longs]] = {}
        units = []
        for begin in range(start, end, queries):
            last = min(begin + queries, end) - 1
            numbers = range(self._first(begin) // _KEYS, last // _KEYS + 1)
            for number in numbers:
                if number not in blocks:
                    positions = number * _KEYS + np.arange(_KEYS)
                    blocks[number] = number, self._places(row, positions.clip(kept, end - 1))
            at = np.arange(begin, last + 1)
            units.append(_Unit(at - start + token, at, [blocks[number] for number in numbers]))
        return units

    def _of_tree(self, row: int, root: int, token: int, bits: Longs) -> list[_Unit]:
        blocks: dict[int, tuple[int, Longs]] = {}  # before the root: the same for all
        units = []
        for index, seen in enumerate(bits.tolist()):
            path = np.array([node for node in range(64) if seen >> node & 1])
            last = root + len(path) - 1
            kept, own = self._first(last), []
            for number in range(kept // _KEYS, last // _KEYS + 1):
                positions = (number * _KEYS + np.arange(_KEYS)).clip(kept, last)
                inside = (positions - root).clip(0)
                held = number, self._places(row, np.where(positions < root, positions, root + path[inside]))
                own.append(blocks.setdefault(number, held) if self._shared(number, root) else held)
            units.append(_Unit(np.array([token + index]), np.array([last]), own))
        return units

    def _shared(self, number: int, root: int) -> bool:
        return not self.window and (number + 1) * _KEYS <= root

    def _first(self, position: int) -> int:
        """The first position that a query at ``position`` sees."""
        return max(0, position + 1 - self.window) if self.window else 0

    def _places(self, row: int, positions: Longs) -> Longs:
        size = self.page_size
        places: Longs = self.rows.pages[row, positions // size].astype(np.int64) * size + positions % size
        return places

    def _group(self, units: Sequence[_Unit], queries: int) -> _Group:
        grouped = np.stack([np.resize(unit.tokens, queries) for unit in units])
        at = np.stack([np.resize(unit.at, queries) for unit in units])
        result = [index * queries + np.arange(len(unit.tokens)) for index, unit in enumerate(units)]
        blocks: dict[int, int] = {}
        places: list[Longs] = []
        pairs: list[tuple[int, int]] = []
        numbers: list[int] = []
        turns: dict[int, tuple[list[int], list[int]]] = {}
        for index, unit in enumerate(units):
            for turn, (number, held) in enumerate(unit.blocks):
                if id(held) not in blocks:
                    blocks[id(held)] = len(places)
                    places.append(held)
                pair_list, unit_list = turns.setdefault(turn, ([], []))
                pair_list.append(len(pairs))
                unit_list.append(index)
                pairs.append((index, blocks[id(held)]))
                numbers.append(number)
        keys = (np.array(numbers)[:, None] * _KEYS + np.arange(_KEYS))[:, None]
        queries_at = at[[unit for unit, _ in pairs]][:, :, None]
        hidden = keys > queries_at
        if self.window:
            hidden |= keys <= queries_at - self.window
        return _Group(
            self.put(grouped.ravel()),
            self.put(np.concatenate(result)),
            self.put(np.concatenate([unit.tokens for unit in units])),
            self.put(np.concatenate(places)),
            pairs,
            self.put(np.array([unit for unit, _ in pairs])),
            self.put(hidden[:, None, :, None]),
            [(self.put(np.array(first)), self.put(np.array(second))) for first, second in turns.values()],
        )


_alike: dict[tuple[object, ...], bool] = {}
"""Whether ``rows_alike`` found so, by device and shape."""


def _queries(heads: int, kv_heads: int, dim: int, like: Tensor) -> tuple[int, int]:
    """Queries of a unit, and lines of its products."""
    group = heads // kv_heads
    queries = max(1, _LINES // group)
    lines = -(-queries * group // _LINES) * _LINES
    key = like.device, kv_heads, lines, dim, torch.get_num_threads()
    if key not in _alike:
        keys = torch.randn((kv_heads, _KEYS, dim), generator=torch.Generator().manual_seed(1)).to(like.device)
        scores, values = keys.transpose(1, 2), keys
        _alike[key] = rows_alike(lambda x: torch.bmm(x, scores), (kv_heads, lines, dim), keys) and rows_alike(
            lambda x: torch.bmm(x, values), (kv_heads, lines, _KEYS), keys
        )
    return (queries if _alike[key] else 1), lines


def attend(queries: Tensor, kv_heads: int, read: Read, plan: InvariantPlan, scale: float) -> Tensor:
    """``queries`` [tokens, heads, dim] -> [tokens, heads * dim] in their dtype; all sums are float32."""
    tokens, heads, dim = queries.shape
    wide = queries.float() * scale
    query_count, lines = _queries(heads, kv_heads, dim, wide)
    out = torch.empty((tokens, heads * dim), dtype=queries.dtype, device=queries.device)
    numbers = kv_heads * (2 * dim * _KEYS + 2 * lines * _KEYS)
    for group in plan.groups(query_count, numbers):
        result = _attend(wide, kv_heads, read, group, query_count, lines)
        out.index_copy_(0, group.to, result.index_select(0, group.found).to(out.dtype))
    return out


def _attend(queries: Tensor, kv_heads: int, read: Read, group: _Group, query_count: int, lines: int) -> Tensor:
    """-> float32 [units * most, heads * dim]."""
    _, heads, dim = queries.shape
    shared = heads // kv_heads
    used = query_count * shared
    apart = queries.index_select(0, group.query_tokens).view(-1, query_count, kv_heads, shared, dim).transpose(1, 2)
    units = len(apart)
    grouped = queries.new_zeros((units, kv_heads, lines, dim))
    grouped[:, :, :used] = apart.reshape(units, kv_heads, used, dim)
    kept = read(group.places).view(-1, _KEYS, 2, kv_heads, dim).permute(2, 0, 3, 1, 4)
    both = queries.new_empty(kept.shape).copy_(kept)
    keys, values = both[0].transpose(2, 3), both[1]

    scores = queries.new_empty((len(group.pairs), kv_heads, lines, _KEYS))
    for pair, (unit, block) in enumerate(group.pairs):
        torch.bmm(grouped[unit], keys[block], out=scores[pair])
    scores[:, :, :used].unflatten(2, (query_count, shared)).masked_fill_(group.hidden, -torch.inf)
    top = queries.new_full((units, kv_heads, lines), -torch.inf)
    highest = scores.amax(-1)
    for pairs, at in group.turns:
        top[at] = torch.maximum(top[at], highest[pairs])
    scores -= top.index_select(0, group.units).unsqueeze(-1)
    weights = by_lines(torch.exp_, scores)
    sums = pairwise_sum(weights)
    parts = queries.new_empty((len(group.pairs), kv_heads, lines, dim))
    for pair, (_, block) in enumerate(group.pairs):
        torch.bmm(weights[pair], values[block], out=parts[pair])
    norm, total = torch.zeros_like(top), torch.zeros_like(grouped)
    for pairs, at in group.turns:
        norm[at] += sums[pairs]
        total[at] += parts[pairs]
    total = total[:, :, :used] / norm[:, :, :used].unsqueeze(-1)
    return (
        total.view(units, kv_heads, query_count, shared, dim).transpose(1, 2).reshape(units * query_count, heads * dim)
    )
