"""Random steps of decodes, drafts and prefills, and the expected results of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.core.attention_rows import AttentionRows
from kernels.core.tree import tree_of
from kernels.devices.base import Device

__all__ = ["Case", "made", "tree_parents"]


@dataclass(frozen=True)
class Case:
    """``expected`` [tokens, heads * dim]: the attention of ``queries`` over the tokens that each attends to."""

    cache: Any
    rows: AttentionRows
    queries: Tensor
    expected: Tensor


def tree_parents(generator: torch.Generator, nodes: int) -> list[int]:
    """The mask bits of a random tree."""
    return [-1] + [int(torch.randint(node, (), generator=generator)) for node in range(1, nodes)]


def made(
    platform: Device,
    generator: torch.Generator,
    *,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    page_size: int,
    window: int,
    decodes: tuple[int, ...] = (),
    drafts: tuple[tuple[int, int], ...] = (),
    prefills: tuple[tuple[int, int], ...] = (),
    trees: bool,
    drafted: int = 0,
    scale: float = 0.2,
    fill: float = 1e4,
    put: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Case:
    """``decodes``: starts. ``drafts``, ``prefills``: starts and counts. ``drafted``: number of a draft's nodes that
    earlier steps have computed; only the others are queries. Cache entries outside of all rows are ``fill``.
    """
    roots = [start for start, _ in drafts]
    starts = np.array([*decodes, *(start + drafted for start in roots), *(start for start, _ in prefills)])
    drawn = [count - drafted for _, count in drafts]
    counts = np.array([*(1 for _ in decodes), *drawn, *(count for _, count in prefills)])
    lengths = starts + counts
    columns = -(-int(lengths.max()) // page_size)
    total = int((-(-lengths // page_size)).sum()) + 3
    (cache,) = platform.cache.make(1, total, page_size, kv_heads, dim, dtype)
    everywhere = torch.arange(total * page_size)
    platform.cache.write(
        cache, put(everywhere), put(torch.full((len(everywhere), 2 * kv_heads, dim), fill, dtype=dtype))
    )
    free = (torch.randperm(total - 1, generator=generator) + 1).tolist()
    tables = np.zeros((len(starts), columns), dtype=np.int32)
    max_drafts = max((count for _, count in drafts), default=1)
    parents = [tree_parents(generator, max_drafts) if trees else [*range(-1, max_drafts - 1)] for _ in drafts]
    queries, expected = [], []
    for row, (start, count, length) in enumerate(zip(starts.tolist(), counts.tolist(), lengths.tolist(), strict=True)):
        pages = [free.pop() for _ in range(-(-length // page_size))]
        tables[row, : len(pages)] = pages
        index = torch.tensor([pages[at // page_size] * page_size + at % page_size for at in range(length)])
        keys_values = torch.randn(length, 2 * kv_heads, dim, generator=generator).to(dtype)
        platform.cache.write(cache, put(index), put(keys_values))
        draft = row - len(decodes)
        for at in range(start, start + count):
            query = torch.randn(heads, dim, generator=generator).to(dtype)
            if 0 <= draft < len(drafts):
                node, path = at - roots[draft], []
                while node >= 0:
                    path.append(roots[draft] + node)
                    node = parents[draft][node]
                path = [*range(roots[draft]), *path[::-1]]
            else:
                path = list(range(at + 1))
            if window:
                path = path[-window:]
            keys, values = keys_values[path].double().repeat_interleave(heads // kv_heads, 1).chunk(2, 1)
            weights = torch.einsum("hd,thd->ht", query.double(), keys).mul(scale).softmax(-1)
            queries.append(query)
            expected.append(torch.einsum("ht,thd->hd", weights, values).flatten())
    tree = None
    if trees:
        tree = tree_of(torch.zeros(len(drafts), max_drafts), torch.tensor(parents)).bits[:, drafted:].contiguous()
    rows = AttentionRows(
        starts,
        counts,
        tables,
        len(decodes),
        verifies=len(drafts),
        tree=None if tree is None else put(tree),
        roots=np.array(roots) if drafted else None,
    )
    return Case(cache, rows, put(torch.stack(queries)), torch.stack(expected).float())
