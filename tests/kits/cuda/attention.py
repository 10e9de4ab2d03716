"""Attention by plain torch, for comparison."""

from __future__ import annotations

import torch

__all__ = [
    "reference_attention",
]


def reference_attention(queries, cache, pages, lengths, window, scale):
    (rows, heads, dim), kv_heads = queries.shape, cache.shape[2]
    found = []
    for row in range(rows):
        both = cache[pages[row].long()].double().permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, dim)
        first = max(0, int(lengths[row]) - window) if window else 0
        keys, values = both[:, :, first : int(lengths[row])]
        query = queries[row].double().view(kv_heads, heads // kv_heads, dim)
        weights = (query @ keys.transpose(1, 2) * scale).softmax(-1)
        found.append((weights @ values).reshape(heads, dim))
    return torch.stack(found)
