"""Attention over a latent cache in plain torch, for devices without a kernel for it.

One vector of each token stands for the keys and values of all heads (MLA, DeepSeek-AI, arXiv 2405.04434, section 2.1):
its first numbers are what ``LatentHeads`` makes them from, its last ones are the rotated part of every key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from kernels.core.attention_rows import AttentionRows
from kernels.core.layer_context import LayerContext
from kernels.core.operators import Norm
from kernels.devices.latent_cache import Vectors, page_size_of, read_latent
from kernels.weights.quantization.weights import Projection

__all__ = [
    "AdaptedLatentHeads",
    "LatentHeads",
    "LatentPrologue",
    "LatentSpaceHeads",
    "LatentWeights",
    "attend_latent",
    "attend_latent_heads",
    "attend_row",
    "hidden_tokens",
    "row_pages",
    "row_vectors",
    "shares",
]

_EXPANDED = 256
"""Queries of a row from which on making keys and values of all tokens costs less than it saves (decision 0062). A query
takes ``2 * rank + rope_dim`` products with each token in the latent space, ``plain_dim + rope_dim + value_dim`` with
keys and values, which take ``rank * (plain_dim + value_dim)`` to make."""
_QUERIES = 256  # of a row at a time, so that the scores of a long prompt fit in memory
_NUMBERS = 1 << 25  # of keys and values that are made at a time


@dataclass(frozen=True, eq=False)
class LatentHeads:
    """What makes keys and values of the first ``rank`` numbers of latent vectors: ``keys`` [heads, plain_dim, rank] and
    ``values`` [heads, rank, value_dim]. ``sinks`` float32 [heads]: logits beside the scores of tokens, without values.
    ``identity``: queries are in the latent space before attention, and so are results after it."""

    keys: Tensor
    values: Tensor
    sinks: Tensor | None = None
    identity: ClassVar[bool] = False

    @property
    def rank(self) -> int:
        """Numbers of a vector that keys and values are made from."""
        return self.keys.shape[2]

    def absorb(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """``queries`` [tokens, heads, plain_dim + rope_dim] -> their plain parts in latent space [tokens, heads, rank],
        and the rotated ones."""
        plain, rotated = queries.split((self.keys.shape[1], queries.shape[2] - self.keys.shape[1]), 2)
        return torch.bmm(plain.transpose(0, 1), self.keys).transpose(0, 1), rotated

    def expand(self, found: Tensor) -> Tensor:
        """Sums of latent vectors ``found`` [tokens, heads, rank] -> of values, [tokens, heads, value_dim]."""
        return torch.bmm(found.transpose(0, 1), self.values).transpose(0, 1)


class LatentSpaceHeads(LatentHeads):
    """Heads of attention in the latent space itself: ``keys`` and ``values`` are identity matrices."""

    identity = True

    @classmethod
    def of(cls, heads: LatentHeads) -> LatentSpaceHeads:
        """As many as ``heads``, of the same rank."""
        same = torch.eye(heads.rank, dtype=heads.keys.dtype, device=heads.keys.device)
        same = same.expand(len(heads.keys), -1, -1)
        return cls(same, same, heads.sinks)

    def absorb(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        plain, rotated = queries.split((self.rank, queries.shape[2] - self.rank), 2)
        return plain, rotated

    def expand(self, found: Tensor) -> Tensor:
        return found


class AdaptedLatentHeads:
    """``heads`` with what adapters add to them, by the adapter of each query: W + BA makes keys and values of latent
    vectors, so queries enter the latent space as q W + (q B) A, and results v leave it as W v + B (A v).

    down [places, rank of adapters, rank of ``heads``], up [places, rank of adapters, heads * (plain_dim + value_dim)],
    whose outputs are its first dimension in memory. factor: of latent vectors. Products are of all places, and those of
    others than a row's are masked: their shapes are static, and many rows take no copies of matrices.
    """

    def __init__(self, heads: LatentHeads, context: LayerContext, down: Tensor, up: Tensor, factor: float) -> None:
        self.heads, self.context, self.factor = heads, context, factor
        self.in_space = LatentSpaceHeads.of(heads)
        places, rank, _ = up.shape
        self._down = down.flatten(0, 1)
        by_head = up.permute(2, 0, 1).view(len(heads.keys), -1, places * rank)
        self._keys, self._values = by_head.split((heads.keys.shape[1], heads.values.shape[2]), 1)
        self._places = torch.arange(places, device=up.device).repeat_interleave(rank)

    def absorb(self, queries: Tensor) -> Tensor:
        """``queries`` [tokens, heads, plain_dim + rope_dim] -> in latent space [tokens, heads, rank + rope_dim]."""
        plain, rotated = self.heads.absorb(queries)
        low = torch.bmm(queries[..., : self._keys.shape[1]].transpose(0, 1), self._keys)
        return torch.cat((plain + torch.matmul(self._masked(low), self._down).transpose(0, 1), rotated), 2)

    def expand(self, found: Tensor) -> Tensor:
        """As ``LatentHeads.expand``."""
        low = self._masked(torch.matmul(found.transpose(0, 1), self._down.t()))
        return self.heads.expand(found) + torch.bmm(low, self._values.transpose(1, 2)).transpose(0, 1)

    def _masked(self, low: Tensor) -> Tensor:
        """``low`` [heads, tokens, places * rank of adapters] without what is not of a token's place."""
        low = low.masked_fill(self.context.rows[:, None] != self._places, 0)
        return low if self.factor == 1.0 else low * self.factor


class LatentPrologue(Protocol):
    """A device's own way from tokens to latent attention, in place of projections, ``Attention.place_latent`` and
    ``Attention.attend_latent``."""

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Any, batch: Any, scale: float) -> Tensor | None:
        """Attention of normed tokens ``x`` [tokens, hidden] -> [tokens, heads, value_dim]; their vectors are written to
        ``cache``. None: not of such a step, nothing is written."""
        ...

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries before their norm [tokens, query_rank], and latent vectors [tokens, rank + rope_dim]."""
        ...

    def queries(self, compressed: Tensor) -> Tensor:
        """Queries [tokens, heads * (plain_dim + rope_dim)] of normed ones; halves of the last numbers rotate."""
        ...


@dataclass(frozen=True, eq=False)
class LatentWeights:
    """What a layer projects tokens with: ``down`` [query_rank, hidden], ``up`` [heads * (plain_dim + rope_dim),
    query_rank], ``vectors`` [rank + rope_dim, hidden]; neighbors of the numbers to rotate are pairs. ``query_norm`` and
    ``norm`` follow ``down`` and ``vectors``."""

    down: Projection
    up: Projection
    vectors: Projection
    query_norm: Norm
    norm: Norm
    heads: LatentHeads


def attend_latent_heads(
    queries: Tensor, cache: Vectors, rows: AttentionRows, heads: LatentHeads, scale: float
) -> Tensor:
    """Causal attention of ``queries`` [tokens, heads, plain_dim + rope_dim] -> [tokens, heads, value_dim].

    The first rows, up to one of many tokens, are attended to in the latent space, the others with keys and values that
    are made for them, unless there are none to make, or heads have sinks.
    """
    many = (rows.counts >= _EXPANDED).nonzero()[0]
    few = int(many[0]) if len(many) and not heads.identity and heads.sinks is None else len(rows.counts)
    tokens = int(rows.counts[:few].sum())
    out = queries.new_empty(*queries.shape[:2], heads.values.shape[2])
    if tokens:
        first = replace(rows, starts=rows.starts[:few], counts=rows.counts[:few], pages=rows.pages[:few])
        absorbed = torch.cat(heads.absorb(queries[:tokens]), 2)
        out[:tokens] = heads.expand(attend_latent(absorbed, cache, first, heads.rank, scale, heads.sinks))
    for row in range(few, len(rows.counts)):
        start, count = int(rows.starts[row]), int(rows.counts[row])
        here = slice(tokens, tokens + count)
        _attend_expanded(queries[here], row_vectors(cache, rows, row, queries.device), heads, start, scale, out[here])
        tokens += count
    return out


def attend_latent(
    queries: Tensor, cache: Vectors, rows: AttentionRows, dim: int, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Causal attention of ``queries`` [tokens, heads, width] over the tokens of their rows -> [tokens, heads, dim].

    dim: numbers of a vector that are its value. sinks: as ``LatentHeads``. The vectors of the queries' own tokens are
    already in the cache. Only positions of the row are read, so that other contents of a page, finite or not, have no
    effect.
    """
    out = queries.new_empty(*queries.shape[:2], dim)
    begin = 0
    for row, count in enumerate(rows.counts.tolist()):
        here = slice(begin, begin + count)
        vectors = row_vectors(cache, rows, row, queries.device)
        attend_row(queries[here], vectors, rows, row, scale, out[here], sinks=sinks)
        begin += count
    return out


def attend_row(
    queries: Tensor,
    vectors: Tensor,
    rows: AttentionRows,
    row: int,
    scale: float,
    out: Tensor,
    *,
    sinks: Tensor | None = None,
) -> None:
    """``attend_latent`` of one row's ``queries`` [count, heads, width] over its ``vectors`` [start + count, width], to
    ``out`` [count, heads, dim]."""
    dim = out.shape[2]
    for low in range(0, len(queries), _QUERIES):
        high = min(low + _QUERIES, len(queries))
        hidden = hidden_tokens(rows, row, low, high, vectors.device)
        keys = vectors[: hidden.shape[1]]
        # One product for all heads, which share the vectors: a product for each takes a hundred times as long in
        # bfloat16 on a CPU.
        scores = torch.mm(queries[low:high].flatten(0, 1), keys.t()).view(high - low, -1, len(keys))
        wide = (scores.float() * scale).masked_fill_(hidden.unsqueeze(1), -torch.inf)
        weights = shares(wide, sinks).to(scores.dtype)
        torch.mm(weights.flatten(0, 1), keys[:, :dim], out=out[low:high].flatten(0, 1))


def shares(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax of ``scores`` float32 [queries, heads, tokens], of which ``sinks`` [heads] take a part."""
    if sinks is None:
        return scores.softmax(-1)
    beside = sinks.view(1, -1, 1).expand(len(scores), -1, 1)
    return torch.cat((scores, beside), 2).softmax(-1)[..., :-1]


def hidden_tokens(rows: AttentionRows, row: int, low: int, high: int, device: torch.device) -> Tensor:
    """The tokens that queries ``low .. high`` of a row do not see, bool [queries, tokens]. Of no further tokens
    any of them sees one."""
    start, draft = int(rows.starts[row]), row - rows.decodes
    if rows.tree is None or not 0 <= draft < rows.verifies:
        tokens = torch.arange(start + high, device=device)
        return tokens > tokens[start + low :].unsqueeze(1)
    root = start if rows.roots is None else int(rows.roots[draft])
    after = torch.arange(start + int(rows.counts[row]), device=device) - root
    seen = rows.tree[draft, low:high].unsqueeze(1) >> after.clamp(0, 63) & 1
    return (after >= 0) & (seen == 0)


def _attend_expanded(
    queries: Tensor, vectors: Tensor, heads: LatentHeads, start: int, scale: float, out: Tensor
) -> None:
    """Attention of one row's ``queries`` [count, heads, plain_dim + rope_dim] over ``vectors`` [start + count, width],
    to ``out`` [count, heads, value_dim]."""
    tokens, count, dim, rank = len(vectors), len(queries), heads.keys.shape[1], heads.rank
    latent, rotated, value_dim = vectors[:, :rank], vectors[:, rank:], out.shape[2]
    width = max(queries.shape[2], value_dim)  # torch's kernels take keys and values of one size
    size = max(1, _NUMBERS // (tokens * 2 * width))
    for first in range(0, queries.shape[1], size):
        some = slice(first, first + size)
        given = pad(queries[:, some], (0, width - queries.shape[2])).transpose(0, 1)
        keys, values = (latent.new_zeros(tokens, given.shape[0], width) for _ in range(2))
        keys[..., :dim] = torch.mm(latent, heads.keys[some].flatten(0, 1).t()).unflatten(1, (-1, dim))
        keys[..., dim : dim + rotated.shape[1]] = rotated.unsqueeze(1)
        made = heads.values[some].transpose(1, 2).flatten(0, 1).t()
        values[..., :value_dim] = torch.mm(latent, made).unflatten(1, (-1, value_dim))
        for low in range(0, count, _QUERIES):
            high = min(low + _QUERIES, count)
            seen = torch.ones(high - low, start + high, dtype=torch.bool, device=out.device).tril(start + low)
            result = scaled_dot_product_attention(
                given[None, :, low:high],
                keys[None, : start + high].transpose(1, 2),
                values[None, : start + high].transpose(1, 2),
                attn_mask=seen,
                scale=scale,
            )
            out[low:high, some] = result[0, ..., :value_dim].transpose(0, 1)


def row_vectors(cache: Vectors, rows: AttentionRows, row: int, device: torch.device) -> Tensor:
    """The vectors [tokens, width] that a row sees, its own tokens' among them."""
    page_size, end = page_size_of(cache), int(rows.starts[row] + rows.counts[row])
    pages = row_pages(rows, row, page_size, device)
    places = (pages.unsqueeze(1) * page_size + torch.arange(page_size, device=device)).flatten()[:end]
    return read_latent(cache, places)


def row_pages(rows: AttentionRows, row: int, page_size: int, device: torch.device) -> Tensor:
    """The pages int64 [pages] that hold the tokens which a row sees."""
    count = -(-int(rows.starts[row] + rows.counts[row]) // page_size)
    return torch.from_numpy(rows.pages[row, :count]).to(device, torch.int64)
