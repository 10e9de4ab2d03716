"""Attention to the tokens that an indexer chooses, over latent vectors, in plain torch (DeepSeek sparse attention,
DeepSeek-AI, arXiv 2512.02556, section 2.1), for devices without kernels for it.

    score(query, token) = sum over index heads h of  weight[h] * relu(q[h] @ k[token])

A query attends to the tokens before it, itself among them, with the highest scores, of equal ones to the first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.core.attention_rows import AttentionRows
from kernels.devices.latent_attention import LatentHeads, attend_row, hidden_tokens, row_pages, row_vectors, shares
from kernels.devices.latent_cache import Vectors, page_size_of, read_latent

__all__ = ["Chosen", "attend_chosen", "choose_tokens", "highest"]

_NUMBERS = 1 << 25
"""Most numbers of scores, or of gathered vectors, that are held at a time."""
_CPU_NUMBERS = 1 << 20
"""The same on a CPU, where they stay in its caches (decision 0122)."""

Chosen = list[Tensor | None]
"""For each row the positions int64 [queries, chosen] that its queries attend to, -1 for none; None: all tokens."""


def choose_tokens(queries: Tensor, weights: Tensor, keys: Vectors, rows: AttentionRows, top_k: int) -> Chosen | None:
    """The tokens that each query attends to, at most ``top_k``; None: all queries see no more than that.

    queries: [tokens, heads, dim]. weights: float32 [tokens, heads]. keys: a cache [pages, page_size, dim] that holds
    those of the queries' own tokens.
    """
    ends = rows.starts + rows.counts
    if int(ends.max()) <= top_k:
        return None
    result: Chosen = []
    begin = 0
    for row, (end, count) in enumerate(zip(ends.tolist(), rows.counts.tolist(), strict=True)):
        if end <= top_k:
            result.append(None)
            begin += count
            continue
        held, best = row_vectors(keys, rows, row, queries.device).float().t(), []
        step = max(1, _numbers(queries.device) // (end * queries.shape[1]))
        for low in range(0, count, step):
            high = min(low + step, count)
            here = slice(begin + low, begin + high)
            scores = torch.mm(queries[here].float().flatten(0, 1), held).relu_().view(high - low, -1, end)
            total = torch.bmm(weights[here].unsqueeze(1), scores).squeeze(1)
            hidden = hidden_tokens(rows, row, low, high, queries.device)
            total[:, : hidden.shape[1]].masked_fill_(hidden, -torch.inf)
            total[:, hidden.shape[1] :] = -torch.inf
            found = highest(total, top_k)
            best.append(found.masked_fill_(total.gather(1, found) == -torch.inf, -1))
        result.append(torch.cat(best))
        begin += count
    return result


def highest(scores: Tensor, count: int) -> Tensor:
    """The places int64 [rows, count] of the highest ``scores`` [rows, more], in order; of equal ones the first, however
    many are hidden after them: many scores are 0, and a prompt's chunks must not decide. Makes NaN lowest."""
    scores.masked_fill_(scores.isnan(), -torch.inf)  # one sequence's NaN must not fail the step
    least = scores.topk(count, 1).values[:, -1:]
    above, equal = scores > least, scores == least
    left = count - above.sum(1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(1) <= left))
    return chosen.to(scores.dtype).topk(count, 1).indices.sort(1).values  # nonzero would wait for the device


def attend_chosen(
    queries: Tensor, cache: Vectors, rows: AttentionRows, heads: LatentHeads, scale: float, chosen: Chosen
) -> Tensor:
    """Attention of ``queries`` [tokens, heads, width], which are in the latent space of ``heads``, over the ``chosen``
    tokens of their rows -> [tokens, heads, rank]. A query takes the same time however many tokens it sees."""
    dim = heads.rank
    out = queries.new_empty(*queries.shape[:2], dim)
    page_size, width = page_size_of(cache), queries.shape[2]
    begin = 0
    for row, count in enumerate(rows.counts.tolist()):
        own, best = slice(begin, begin + count), chosen[row]
        begin += count
        if best is None:
            vectors = row_vectors(cache, rows, row, queries.device)
            attend_row(queries[own], vectors, rows, row, scale, out[own], sinks=heads.sinks)
            continue
        pages = row_pages(rows, row, page_size, queries.device)
        step = max(1, _numbers(queries.device) // (best.shape[1] * (width + queries.shape[1])))
        for low in range(own.start, own.stop, step):
            here = slice(low, min(low + step, own.stop))
            some = best[low - own.start : here.stop - own.start]
            at = some.clamp(min=0)
            places = pages[torch.div(at, page_size, rounding_mode="floor")] * page_size + at % page_size
            vectors = read_latent(cache, places.flatten()).view(len(some), -1, width)
            scores = torch.bmm(queries[here], vectors.transpose(1, 2)).float().mul_(scale)
            weights = shares(scores.masked_fill_((some < 0).unsqueeze(1), -torch.inf), heads.sinks).to(vectors.dtype)
            torch.bmm(weights, vectors[..., :dim], out=out[here])
    return out


def _numbers(device: torch.device) -> int:
    return _CPU_NUMBERS if device.type == "cpu" else _NUMBERS
