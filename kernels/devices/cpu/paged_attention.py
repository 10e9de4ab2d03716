"""Paged attention on the CPU in plain torch.

The plan of a step sorts its rows into a few large calls: decodes of similar length are gathered and padded into one
batch, and so are rows that verify as many drafts each; a prefill row runs in blocks of queries over its own keys, so
that no mask grows with the square of a prompt. Masks and page lists are made once a step and used by every layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.core.arrays import Longs
from kernels.core.attention_rows import AttentionRows
from kernels.core.tree import MAX_NODES, chain_bits, unpack_bits, within_window
from kernels.devices.cpu.matmul import HeadWeights
from kernels.devices.cpu.native.library import Step
from kernels.devices.cpu.operators import Cache8bit, Native
from kernels.devices.cpu.program import step_of
from kernels.devices.latent_attention import LatentHeads, attend_latent_heads

__all__ = [
    "SHORT",
    "AttentionPlan",
    "AttentionPlanner",
    "NativeLatentHeads",
    "in_drafts",
    "native_attention",
    "native_latent",
    "paged_attention",
    "with_short",
]

QUERY_BLOCK = 256  # queries of a prefill row in one call
GATHER_TOKENS = 1 << 15  # cached tokens copied for one decode call, at most
SMALL_PAGES = 8  # rows of up to so many pages are not worth sorting apart
SHORT = 48  # tokens up to which the end of a prompt is no prefill to the native operators, which lay out its values


@dataclass(frozen=True)
class DecodeGroup:
    """Rows of ``queries`` each, in one call over ``length`` cached tokens (padded)."""

    rows: Tensor | None  # int64 [rows * queries] into the step's tokens; None: all of them, in order
    pages: Tensor | slice  # int64 [rows * pages], or the run of pages of a single row
    count: int
    first: int  # where the keys begin in the gathered tokens
    length: int
    mask: Tensor | None  # [rows, 1, queries, length], 0 or -inf; None: every key is seen
    queries: int = 1


@dataclass(frozen=True)
class PrefillBlock:
    """Queries ``begin .. end`` of the step's tokens over keys ``first .. last`` of the row's gathered tokens."""

    begin: int
    end: int
    first: int
    last: int
    mask: Tensor  # [queries, keys], 0 or -inf


@dataclass(frozen=True)
class PrefillRow:
    pages: Tensor | slice
    blocks: tuple[PrefillBlock, ...]


@dataclass(frozen=True)
class AttentionPlan:
    """``decodes`` and ``prefills`` are empty where the native operators run the rows."""

    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillRow, ...]
    rows: AttentionRows
    window: int


class AttentionPlanner:
    """Makes plans for a cache of ``page_size`` tokens a page; ``dtype`` is that of queries, keys and masks."""

    def __init__(self, page_size: int, dtype: torch.dtype) -> None:
        self.page_size = page_size
        self.dtype = dtype
        self._triangles: dict[int, Tensor] = {}

    def plan(self, rows: AttentionRows, window: int, native: bool = False) -> AttentionPlan:
        """``window``: how many tokens a query sees, itself included; 0 for all. ``native``: for native operators."""
        if native:
            return AttentionPlan((), (), with_short(rows), window)
        groups = self._groups(rows, np.arange(rows.decodes), window)
        drafts = rows.counts[rows.decodes : rows.decodes + rows.verifies]
        for count in np.unique(drafts):
            groups += self._groups(rows, rows.decodes + np.flatnonzero(drafts == count), window)
        return AttentionPlan(tuple(groups), tuple(self._prefills(rows, window)), rows, window)

    def _groups(self, rows: AttentionRows, chosen: Longs, window: int) -> list[DecodeGroup]:
        """The calls of rows ``chosen``, which run the same number of tokens each."""
        if not len(chosen):
            return []
        lengths = (rows.starts + rows.counts)[chosen]
        firsts = np.maximum(_roots(rows, chosen) + 1 - window, 0) if window else np.zeros_like(lengths)
        first_pages = firsts // self.page_size
        sizes = (lengths + self.page_size - 1) // self.page_size - first_pages
        order = np.argsort(-sizes, kind="stable")
        groups = []
        begin = 0
        while begin < len(order):
            longest = int(sizes[order[begin]])
            min_length = 0 if longest <= SMALL_PAGES else longest // 2
            limit = begin + max(1, GATHER_TOKENS // (longest * self.page_size))
            end = begin + 1
            while end < min(limit, len(order)) and sizes[order[end]] > min_length:
                end += 1
            taken = np.sort(order[begin:end])
            some = firsts[taken], first_pages[taken], lengths[taken]
            groups.append(self._group(rows, chosen[taken], *some, longest, window))
            begin = end
        return groups

    def _group(
        self,
        rows: AttentionRows,
        taken: Longs,
        firsts: Longs,
        first_pages: Longs,
        lengths: Longs,
        pages: int,
        window: int,
    ) -> DecodeGroup:
        queries = int(rows.counts[taken[0]])
        base = first_pages * self.page_size
        low, high = firsts - base, lengths - base
        index = None
        if len(taken) < len(rows.starts):
            offsets = np.cumsum(rows.counts) - rows.counts
            index = torch.from_numpy((offsets[taken, None] + np.arange(queries)).ravel())
        if len(taken) == 1:
            row, page = int(taken[0]), int(first_pages[0])
            run = _page_run(rows.pages[row, page : page + pages])
            first, length = int(low[0]), int(high[0] - low[0])
            if queries == 1:
                return DecodeGroup(index, run, 1, first, length, None)
            mask = self._mask(_hidden(rows, taken, base + first, length, window))
            return DecodeGroup(index, run, 1, first, length, mask, queries)
        columns = first_pages[:, None] + np.arange(pages)
        np.minimum(columns, rows.pages.shape[1] - 1, out=columns)
        table = torch.from_numpy(rows.pages[taken[:, None], columns].ravel().astype(np.int64))
        length = int(high.max())
        if queries == 1:
            place = np.arange(length)
            hidden = ((place >= high[:, None]) | (place < low[:, None]))[:, None]
        else:
            hidden = _hidden(rows, taken, base, length, window)
        return DecodeGroup(index, table, len(taken), 0, length, self._mask(hidden), queries)

    def _mask(self, hidden: npt.NDArray[np.bool_]) -> Tensor:
        """[rows, 1, queries, length] of [rows, queries, length]."""
        mask = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)
        return mask.unsqueeze(1)

    def _prefills(self, rows: AttentionRows, window: int) -> list[PrefillRow]:
        planned = []
        short = rows.decodes + rows.verifies
        offset = int(rows.counts[:short].sum())
        for row in range(short, len(rows.starts)):
            start, count = int(rows.starts[row]), int(rows.counts[row])
            first_page = max(0, start + 1 - window) // self.page_size if window else 0
            last_page = (start + count + self.page_size - 1) // self.page_size
            base = first_page * self.page_size
            blocks = []
            for begin in range(0, count, QUERY_BLOCK):
                end = min(begin + QUERY_BLOCK, count)
                first = max(0, start + begin + 1 - window) if window else 0
                last = start + end
                mask = self._causal_mask(end - begin, last - first, window)
                blocks.append(PrefillBlock(offset + begin, offset + end, first - base, last - base, mask))
            planned.append(PrefillRow(_page_run(rows.pages[row, first_page:last_page]), tuple(blocks)))
            offset += count
        return planned

    def _causal_mask(self, queries: int, keys: int, window: int) -> Tensor:
        """The last query sees the last key. A view of one triangle that is kept and grown as keys need it."""
        triangle = self._triangles.get(window)
        if triangle is None or triangle.shape[1] - QUERY_BLOCK < keys - queries:
            width = max(1024, 1 << (keys - 1).bit_length())
            query, key = torch.arange(QUERY_BLOCK).view(-1, 1), torch.arange(width + QUERY_BLOCK)
            hidden = key > query + width
            if window:
                hidden |= key <= query + width - window
            triangle = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, -torch.inf)
            self._triangles[window] = triangle
        first = triangle.shape[1] - QUERY_BLOCK - (keys - queries)
        return triangle[:queries, first : first + keys]


def with_short(rows: AttentionRows) -> AttentionRows:
    """Prefills of a few tokens become drafts: they are causal as a chain of these is."""
    first = rows.decodes + rows.verifies
    if first == len(rows.starts) or rows.counts[first] > SHORT or rows.roots is not None:
        return rows
    longer = np.flatnonzero(rows.counts[first:] > SHORT)
    short = int(longer[0]) if len(longer) else len(rows.starts) - first
    return replace(rows, verifies=rows.verifies + short, tree=_with_chains(rows, rows.counts[first : first + short]))


def in_drafts(rows: AttentionRows) -> AttentionRows:
    """Each prompt as rows of up to 64 tokens, which are drafts: a query then finds the same bits in a prompt's chunk of
    any size as in a decode.
    """
    first = rows.decodes + rows.verifies
    if first == len(rows.starts):
        return rows
    parts = -(-rows.counts[first:] // MAX_NODES)
    row = np.repeat(np.arange(first, len(rows.starts)), parts)
    begin = (np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts)) * MAX_NODES
    starts, counts = rows.starts[row] + begin, np.minimum(rows.counts[row] - begin, MAX_NODES)
    return AttentionRows(
        np.concatenate((rows.starts[:first], starts)),
        np.concatenate((rows.counts[:first], counts)),
        np.concatenate((rows.pages[:first], rows.pages[row])),
        rows.decodes,
        verifies=rows.verifies + len(row),
        tree=_with_chains(rows, counts),
        roots=None if rows.roots is None else np.concatenate((rows.roots, starts)),
    )


def _with_chains(rows: AttentionRows, counts: Longs) -> Tensor | None:
    """The tree of ``rows``, and behind it chains of ``counts`` tokens: those of prompts do not depend on other rows."""
    tree = rows.tree
    if tree is None:
        return None
    nodes = max(tree.shape[1], int(counts.max()))
    chains = chain_bits(nodes, tree.device).repeat(rows.verifies + len(counts), 1)
    chains[: rows.verifies, : tree.shape[1]] = tree[: rows.verifies]
    return chains


def paged_attention(queries: Tensor, cache: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """``queries`` [tokens, heads, dim], ``cache`` [pages, page_size, 2, kv_heads, dim] -> [tokens, heads * dim]."""
    tokens, heads, dim = queries.shape
    kv_heads = cache.shape[3]
    grouped = queries.view(tokens, kv_heads, heads // kv_heads, dim)
    if len(plan.decodes) == 1 and not plan.prefills and plan.decodes[0].rows is None:
        return _decode(grouped, cache, plan.decodes[0], scale).reshape(tokens, heads * dim)
    out = torch.empty_like(grouped)
    for group in plan.decodes:
        assert group.rows is not None
        out.index_copy_(0, group.rows, _decode(grouped.index_select(0, group.rows), cache, group, scale))
    for row in plan.prefills:
        _prefill(grouped, cache, row, scale, out)
    return out.view(tokens, heads * dim)


def native_attention(
    queries: Tensor,
    cache: Tensor | Cache8bit,
    plan: AttentionPlan,
    scale: float,
    native: Native,
    *,
    sinks: Tensor | None = None,
) -> Tensor:
    """``paged_attention`` by native operators, whose plan it is. ``sinks``: as ``CapAndSinks``."""
    out = native.empty_attention(queries)
    step, keep_alive = step_of(plan.rows)
    native.attention(queries, cache, step, plan.window, scale, out, sinks=sinks)
    del keep_alive
    return out


class NativeLatentHeads:
    """``LatentHeads`` with products in native operators."""

    def __init__(self, native: Native, heads: LatentHeads) -> None:
        self.rank = heads.rank
        self._keys = HeadWeights(native, heads.keys.transpose(1, 2))
        self._values = HeadWeights(native, heads.values.transpose(1, 2))

    @staticmethod
    def fits(heads: LatentHeads) -> bool:
        """Whether there are native products of such sizes."""
        sizes = heads.keys.shape[1], heads.rank, heads.values.shape[2]
        plain = heads.identity or heads.sinks is not None or heads.keys.dtype != torch.bfloat16
        return not plain and not any(size % 32 for size in sizes)

    def attend(self, queries: Tensor, cache: Tensor, step: Step, scale: float, native: Native) -> Tensor:
        """As ``Attention.attend_latent``, over the pages of a ``step`` without prompts."""
        absorbed = native.multiply_heads(queries, self._keys, queries.shape[2] - self._keys.inputs)
        return native.multiply_heads(native.attend_latent(absorbed, cache, step, self.rank, scale), self._values)


def native_latent(
    queries: Tensor,
    cache: Tensor,
    rows: AttentionRows,
    heads: LatentHeads,
    scale: float,
    native: Native,
    packed: NativeLatentHeads | None = None,
) -> Tensor:
    """``attend_latent_heads`` by native operators, but for chunks of more than ``SHORT`` tokens. ``packed``: the
    heads, if their sizes fit."""
    rows = with_short(rows)
    few = rows.decodes + rows.verifies
    first = replace(rows, starts=rows.starts[:few], counts=rows.counts[:few], pages=rows.pages[:few])
    rest = AttentionRows(rows.starts[few:], rows.counts[few:], rows.pages[few:], 0)
    tokens, parts = int(first.counts.sum()), []
    if tokens:
        step, keep_alive = step_of(first)
        if packed is not None:
            parts.append(packed.attend(queries[:tokens], cache, step, scale, native))
        else:
            absorbed = torch.cat(heads.absorb(queries[:tokens]), 2)
            parts.append(heads.expand(native.attend_latent(absorbed, cache, step, heads.rank, scale)))
        del keep_alive
    if tokens < len(queries):
        parts.append(attend_latent_heads(queries[tokens:], cache, rest, heads, scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _decode(queries: Tensor, cache: Tensor, group: DecodeGroup, scale: float) -> Tensor:
    """``queries`` [rows * queries, kv_heads, group, dim], the heads of a group standing in for more queries."""
    gathered = _gather(cache, group.pages)
    _, _, kv_heads, dim = gathered.shape
    token = 2 * kv_heads * dim
    # Keys and values as [rows, kv_heads, length, dim], each in one operator.
    shape = (group.count, kv_heads, group.length, dim)
    strides = (gathered.numel() // group.count, dim, token, 1)
    begin = gathered.storage_offset() + group.first * token
    keys = gathered.as_strided(shape, strides, begin)
    values = gathered.as_strided(shape, strides, begin + kv_heads * dim)
    if group.queries == 1:
        return scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask, scale=scale)
    assert group.mask is not None
    heads = queries.shape[2]
    apart = queries.view(group.count, group.queries, kv_heads, heads, dim).transpose(1, 2)
    result = scaled_dot_product_attention(
        apart.reshape(group.count, kv_heads, -1, dim),
        keys,
        values,
        attn_mask=group.mask.repeat_interleave(heads, 2),
        scale=scale,
    )
    return result.view(apart.shape).transpose(1, 2).reshape(queries.shape)


def _prefill(queries: Tensor, cache: Tensor, row: PrefillRow, scale: float, out: Tensor) -> None:
    gathered = _gather(cache, row.pages)
    group = queries.shape[2]
    for block in row.blocks:
        # The heads of a group become the batch, over which keys and values are only viewed: [group, kv_heads, n, dim].
        keys, values = gathered[block.first : block.last].permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
        result = scaled_dot_product_attention(
            queries[block.begin : block.end].permute(2, 1, 0, 3),
            keys.expand(group, -1, -1, -1),
            values.expand(group, -1, -1, -1),
            attn_mask=block.mask,
            scale=scale,
        )
        out[block.begin : block.end] = result.permute(2, 1, 0, 3)


def _gather(cache: Tensor, pages: Tensor | slice) -> Tensor:
    """-> [tokens, 2, kv_heads, dim]: a view for a run of pages, else a copy."""
    chosen = cache[pages] if isinstance(pages, slice) else cache.index_select(0, pages)
    return chosen.view(-1, *cache.shape[2:])


def _page_run(pages: npt.NDArray[np.int32]) -> Tensor | slice:
    """Pages that follow one another need no copy."""
    first = int(pages[0])
    if len(pages) == 1 or bool((np.diff(pages) == 1).all()):
        return slice(first, first + len(pages))
    return torch.from_numpy(pages.astype(np.int64))


def _roots(rows: AttentionRows, chosen: Longs) -> Longs:
    """The position before which each query of the rows ``chosen`` sees all tokens."""
    if rows.tree is None or rows.roots is None or chosen[0] < rows.decodes:
        return rows.starts[chosen]
    return rows.roots[chosen - rows.decodes]


def _hidden(rows: AttentionRows, chosen: Longs, base: Longs, length: int, window: int) -> npt.NDArray[np.bool_]:
    """[rows, queries, length]: whether positions ``base`` .. ``base + length - 1`` are not seen by the queries of rows
    ``chosen``, which verify drafts.
    """
    queries, roots = int(rows.counts[chosen[0]]), _roots(rows, chosen)
    bits = chain_bits(queries, torch.device("cpu")).expand(len(chosen), queries)
    if rows.tree is not None:
        bits = rows.tree[torch.from_numpy(chosen - rows.decodes), :queries]
    seen = unpack_bits(within_window(bits, window), MAX_NODES).numpy()
    place = np.broadcast_to((base - roots)[:, None, None] + np.arange(length), (len(chosen), queries, length))
    result = ~np.take_along_axis(seen, np.clip(place, 0, MAX_NODES - 1), 2) | (place >= MAX_NODES)
    return np.where(place < 0, place < seen.sum(2, keepdims=True) - window if window else False, result)
