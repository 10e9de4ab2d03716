"""Attention over the same cache in plain torch operators: for float32, for unsupported head dimensions, and for
debugging. Slow: it copies every key that it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kernels.core.attention_rows import AttentionRows
from kernels.devices.npu.fused_attention import LayerCache
from kernels.devices.npu.tree_attention import hidden_keys, mask_keys

Put = Callable[[np.ndarray], Tensor]
"""Copies an array to the device."""

__all__ = ["NativePart", "NativeRows", "native_attention", "plan_native"]


@dataclass(frozen=True)
class NativeRows:
    """Rows of ``queries`` tokens each, from token ``begin`` of the part on.

    ``pages`` int64 [rows * pages]. ``hidden`` bool [rows, 1, 1, queries, keys]: True where a key is masked.
    """

    begin: int
    rows: int
    queries: int
    pages: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class NativePart:
    """Attention of tokens ``begin .. end`` of the step."""

    begin: int
    end: int
    groups: tuple[NativeRows, ...]


def plan_native(rows: AttentionRows, first: int, last: int, window: int, put: Put) -> NativePart:
    """Plan decodes as one group and each other row separately."""
    decodes = min(last, max(first, rows.decodes))
    bounds = [(first, decodes)] if decodes > first else []
    bounds += [(row, row + 1) for row in range(decodes, last)]
    base = offset = int(rows.counts[:first].sum())
    groups = []
    for low, high in bounds:
        groups.append(_rows(rows, low, high, offset - base, window, put))
        offset += int(rows.counts[low:high].sum())
    return NativePart(base, offset, tuple(groups))


def _rows(rows: AttentionRows, low: int, high: int, begin: int, window: int, put: Put) -> NativeRows:
    """Plan rows ``low .. high``, which have the same number of tokens."""
    starts, queries = rows.starts[low:high], int(rows.counts[low])
    length = int(starts.max()) + queries
    draft = low - rows.decodes
    if rows.tree is not None and 0 <= draft < rows.verifies:
        one = replace(
            rows,
            starts=starts,
            counts=rows.counts[low:high],
            decodes=0,
            verifies=1,
            tree=rows.tree[draft : draft + 1],
            roots=None if rows.roots is None else rows.roots[draft : draft + 1],
        )
        unseen = hidden_keys(one, queries, mask_keys(length, 1), window, put)[..., :length].bool().unsqueeze(2)
    else:
        keys, at = np.arange(length), starts[:, None] + np.arange(queries)
        hidden = keys > at[..., None]
        if window:
            hidden |= keys <= at[..., None] - window
        unseen = put(hidden[:, None, None])
    return NativeRows(
        begin=begin,
        rows=high - low,
        queries=queries,
        pages=put(rows.pages[low:high].ravel().astype(np.int64)),
        hidden=unseen,
    )


def native_attention(
    queries: Tensor, cache: LayerCache, part: NativePart, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """``queries`` [part's tokens, heads, dim] -> the same shape and dtype; sums in float32. ``sinks`` float32 [heads]:
    scores of one more token, whose value is 0."""
    _, heads, dim = queries.shape
    kv_heads = cache.keys.shape[2]
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    for group in part.groups:
        length = group.hidden.shape[-1]

        def gather(cached: Tensor, group: NativeRows = group, length: int = length) -> Tensor:
            """[rows, kv_heads, 1, length, dim]"""
            result = cached.index_select(0, group.pages).view(group.rows, -1, kv_heads, cached.shape[3])
            return result[:, :length, :, :dim].float().transpose(1, 2).unsqueeze(2)

        end = group.begin + group.rows * group.queries
        grouped = queries[group.begin : end].view(group.rows, group.queries, kv_heads, heads // kv_heads, dim)
        scores = grouped.permute(0, 2, 3, 1, 4).float() @ gather(cache.keys).transpose(-1, -2) * scale
        scores = scores.masked_fill(group.hidden, -torch.inf)
        if sinks is not None:
            beside = sinks.view(1, kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, beside), -1)
        weights = scores.softmax(-1)[..., :length]
        values = gather(cache.values)
        result = (weights @ values).permute(0, 3, 1, 2, 4).reshape(-1, heads, dim)
        out[group.begin : end] = result.to(out.dtype)
    return out
