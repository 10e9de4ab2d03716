"""Attention with capped scores (Gemma 2, arXiv 2408.00118), sinks (Xiao et al., arXiv 2309.17453; gpt-oss, arXiv
2508.10925), biases of distances (ALiBi, Press et al., arXiv 2108.12409) or scores that grow with positions (Grok 2) in
plain torch, for devices without a kernel for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.core.attention_rows import AttentionRows

__all__ = ["CapAndSinks", "attend_rows"]

_QUERIES = 256  # of a row at a time, so that the scores of a long prompt fit in memory


@dataclass(frozen=True)
class CapAndSinks:
    """``cap``: scores are ``cap * tanh(score / cap)``; 0: they are not capped. ``sinks`` float32 [heads]: the scores of
    one more token, whose value is 0. ``growth_length``: as ``attend_rows``; 0: scores do not grow."""

    cap: float = 0.0
    sinks: Tensor | None = None
    growth_length: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether scores are as they are."""
        return not self.cap and self.sinks is None and not self.growth_length


def attend_rows(
    queries: Tensor,
    gather: Callable[[Tensor], Tensor],
    rows: AttentionRows,
    page_size: int,
    window: int,
    scale: float,
    cap: float,
    sinks: Tensor | None = None,
    *,
    slopes: Tensor | None = None,
    growth_length: int = 0,
) -> Tensor:
    """Causal attention of ``queries`` [tokens, heads, dim] over the tokens of their rows -> [tokens, heads * dim].
    Scores are ``scale * q @ k``, or with a ``cap`` above 0 ``cap * tanh(scale * q @ k / cap)``. ``sinks`` float32
    [heads]: scores of one more token, whose value is 0. ``slopes`` float32 [heads]: times the distance, they are taken
    off scores. ``growth_length``: scores of queries at positions beyond it are multiplied by the ratio of both's
    logarithms; 0: they are not.

    gather: the keys and values of places int64 [n] in the cache, [n, 2, kv_heads, dim or more]. window: as
    ``ModelConfig.windows``. Only positions that are seen are read.
    """
    heads, dim = queries.shape[1:]
    out = torch.empty_like(queries)
    begin = 0
    for row, count in enumerate(rows.counts.tolist()):
        pages = torch.from_numpy(rows.pages[row]).to(queries.device, torch.int64)
        for low in range(0, count, _QUERIES):
            high = min(low + _QUERIES, count)
            first, at, distance = _distances(rows, row, low, high, window, queries.device)
            seen = torch.arange(first, first + distance.shape[1], device=queries.device)
            both = gather(pages[torch.div(seen, page_size, rounding_mode="floor")] * page_size + seen % page_size)
            keys, values = both[:, 0, :, :dim].to(queries.dtype), both[:, 1, :, :dim].to(queries.dtype)
            hidden = distance < 0
            if window:
                hidden |= distance >= (window if window > 0 else (at % -window + 1).unsqueeze(1))
            grouped = queries[begin : begin + high - low].unflatten(1, (keys.shape[1], heads // keys.shape[1]))
            scores = torch.einsum("qhgd,khd->hgqk", grouped, keys).float()
            scores = scores.mul_(scale / cap).tanh_().mul_(cap) if cap else scores.mul_(scale)
            if growth_length:
                scores *= (torch.log2(at.clamp(min=growth_length)) / math.log2(growth_length)).unsqueeze(1)
            if slopes is not None:
                scores -= slopes.view(*scores.shape[:2], 1, 1) * distance
            weights = _shares(scores.masked_fill_(hidden, -torch.inf), sinks).to(values.dtype)
            result = torch.einsum("hgqk,khd->qhgd", weights, values)
            out[begin : begin + high - low] = result.flatten(1, 2)
            begin += high - low
    return out.flatten(1)


def _distances(
    rows: AttentionRows, row: int, low: int, high: int, window: int, device: torch.device
) -> tuple[int, Tensor, Tensor]:
    """Of queries ``low .. high`` of a row: the first token that one of them sees by its position, the queries'
    positions [queries], and how many positions each token from the first on is before each query [queries, tokens];
    negative: it is not seen. In a tree positions are counted along a query's path."""
    start, draft = int(rows.starts[row]), row - rows.decodes
    tree = rows.tree if 0 <= draft < rows.verifies else None
    root = start + low if tree is None else start if rows.roots is None else int(rows.roots[draft])
    first = max(0, root + 1 - window) if window > 0 else root // -window * -window if window else 0
    if tree is None:
        seen, at = torch.arange(first, start + high, device=device), torch.arange(start + low, start + high).to(device)
        return first, at, at.unsqueeze(1) - seen
    seen = torch.arange(first, start + int(rows.counts[row]), device=device)
    bits = tree[draft, low:high].to(device).unsqueeze(1) >> torch.arange(64, device=device) & 1
    at, after = root + bits.sum(1) - 1, seen - root
    above = bits.flip(1).cumsum(1).flip(1) * bits - 1  # nodes of the path after each; -1: it is none of it
    own = above.index_select(1, after.clamp(0, 63)).masked_fill(after > 63, -1)
    return first, at, torch.where(after < 0, at.unsqueeze(1) - seen, own)


def _shares(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax of ``scores`` [kv_heads, heads of each, queries, tokens], of which ``sinks`` take a part."""
    if sinks is None:
        return scores.softmax(-1)
    beside = sinks.view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat((scores, beside), -1).softmax(-1)[..., :-1]
