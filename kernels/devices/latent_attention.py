"""Attention over a latent cache in plain torch, for devices without a kernel for it.

One vector of each token stands for the keys and values of all heads (MLA, DeepSeek-AI, arXiv 2405.04434, section 2.1):
queries come projected into its space, values are its first numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.core.attention_rows import AttentionRows

__all__ = ["attend_latent", "make_latent", "write_latent"]


def make_latent(pages: int, page_size: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One layer's cache [pages, page_size, width], zeroed."""
    return torch.zeros(pages, page_size, width, dtype=dtype, device=device)


def write_latent(cache: Tensor, index: Tensor, vectors: Tensor) -> None:
    """Write ``vectors`` [tokens, width] to ``index`` int64 [tokens] (page * page_size + offset)."""
    cache.view(-1, cache.shape[-1]).index_copy_(0, index, vectors)


def attend_latent(queries: Tensor, cache: Tensor, rows: AttentionRows, dim: int, scale: float) -> Tensor:
    """Causal attention of ``queries`` [tokens, heads, width] over the tokens of their rows -> [tokens, heads, dim].

    dim: numbers of a vector that are its value. The vectors of the queries' own tokens are already in the cache. Only
    positions of the row are read, so that other contents of a page, finite or not, have no effect.
    """
    page_size, flat = cache.shape[1], cache.view(-1, cache.shape[-1])
    out = queries.new_empty(*queries.shape[:2], dim)
    begin = 0
    for row, (start, count) in enumerate(zip(rows.starts.tolist(), rows.counts.tolist(), strict=True)):
        end = start + count
        pages = torch.from_numpy(rows.pages[row, : -(-end // page_size)]).to(cache.device, torch.int64)
        places = (pages.unsqueeze(1) * page_size + torch.arange(page_size, device=cache.device)).flatten()[:end]
        keys = flat.index_select(0, places)
        scores = torch.einsum("qhw,kw->hqk", queries[begin : begin + count], keys).float() * scale
        seen = torch.arange(start, end, device=cache.device).unsqueeze(1)
        scores.masked_fill_(torch.arange(end, device=cache.device) > seen, -torch.inf)
        weights = scores.softmax(-1).to(keys.dtype)
        out[begin : begin + count] = torch.einsum("hqk,kd->qhd", weights, keys[:, :dim])
        begin += count
    return out
