"""Attention over the paged cache, from a layer's projection to its output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from kernels.contract.caches import Latent
from kernels.core.attention_rows import AttentionRows
from kernels.core.batch import ForwardBatch
from kernels.core.operators import Norm, PendingResidual
from kernels.devices.cache import KvCaches
from kernels.devices.latent_attention import LatentHeads, LatentPrologue, LatentWeights, attend_latent_heads
from kernels.devices.latent_cache import Vectors, write_latent
from kernels.devices.linear import NormThenLinear
from kernels.devices.row_attention import CapAndSinks, attend_rows
from kernels.devices.sparse_attention import attend_chosen, choose_tokens

__all__ = ["Attention", "QkvProjection"]

Cache = TypeVar("Cache")
"""One layer's keys and values, as the device keeps them."""
Plan = TypeVar("Plan")
"""What the device's attention needs to know about a step."""


class Attention(ABC, Generic[Cache, Plan]):
    """Attention of a step's tokens. A plan holds what varies from step to step (lengths, page tables). It is
    built once per step from host arrays and shared by all layers.

    ``signed_sines``: whether ``rotate`` takes the sines of the first half negated. ``pairs_latent``: whether
    ``place_latent`` rotates neighbors of a vector against one another, not halves. ``invariant_latent``: whether
    results of ``attend_latent`` depend on nothing but a query and what it sees. ``plans_latent``: whether
    ``attend_latent`` reads the plan of all tokens instead of rows on the host. ``plans``: of the features that
    ``ModelConfig.attention_features`` names, those that attention has by such a plan, too; offsets: also over
    a cache whose static scales have them.
    """

    signed_sines: bool = True
    pairs_latent: bool = False
    invariant_latent: bool = False
    plans_latent: bool = False
    plans: frozenset[str] = frozenset()

    def __init__(self, caches: KvCaches[Cache]) -> None:
        self.caches = caches

    @abstractmethod
    def plan(self, rows: AttentionRows, window: int) -> Plan:
        """The plan of a step. ``window``: tokens that a query sees, 0 for all."""

    def plan_layers(self, rows: AttentionRows, window: int) -> Plan | None:
        """``plan`` of layers whose ``window`` may be negative: queries see the tokens since its last multiple. None:
        ``attend_rows`` computes them."""
        if window >= 0:
            return self.plan(rows, window)
        return None if rows.verifies else self.plan(rows.in_chunks(-window, self.caches.page_size), 0)

    def plan_draft(
        self, starts: Tensor, pages: Tensor, tokens: int, bits: Tensor | None, roots: Tensor | None, window: int
    ) -> Plan:
        """The plan of rows of ``tokens`` tokens each that all verify, with all numbers on the device: it is part of
        what ``Capture.draft`` captures. ``starts``, ``roots`` int64 [rows], ``pages`` int64 [rows, columns].
        """
        rows = AttentionRows(
            starts=starts.cpu().numpy(),
            counts=np.full(len(starts), tokens, dtype=np.int64),
            pages=pages.cpu().numpy().astype(np.int32),
            decodes=0,
            verifies=len(starts),
            tree=bits,
            roots=None if roots is None else roots.cpu().numpy(),
        )
        return self.plan(rows, window)

    @abstractmethod
    def attend(self, queries: Tensor, cache: Cache, plan: Plan, scale: float) -> Tensor:
        """Causal attention of ``queries`` [tokens, heads, dim] over the pages of their rows -> [tokens, heads * dim].

        The keys and values of the queries' own tokens are already in the cache.
        """

    def attend_rows(
        self,
        queries: Tensor,
        cache: Cache,
        rows: AttentionRows,
        window: int,
        scale: float,
        cap: float,
        sinks: Tensor | None = None,
        *,
        slopes: Tensor | None = None,
        growth_length: int = 0,
    ) -> Tensor:
        """As ``attend``, with scores of ``cap * tanh(score / cap)`` if ``cap`` is above 0, and with ``sinks`` float32
        [heads], the scores of one more token whose value is 0. ``slopes``, ``growth_length``: as
        ``kernels.devices.row_attention``. It reads ``rows`` on the host: no pass with it is captured."""
        caches = self.caches
        return attend_rows(
            queries,
            partial(caches.gather, cache),
            rows,
            caches.page_size,
            window,
            scale,
            cap,
            sinks,
            slopes=slopes,
            growth_length=growth_length,
        )

    def attend_capped(
        self, queries: Tensor, cache: Cache, batch: ForwardBatch, window: int, scale: float, extra: CapAndSinks
    ) -> Tensor:
        """As ``attend``, with scores that are capped or grow, or with sinks. Here by ``attend_rows`` (``plans``)."""
        if batch.rows is None:
            raise ValueError("attention with caps or sinks reads rows on the host; a captured pass has none")
        given = queries, cache, batch.rows, window, scale, extra.cap, extra.sinks
        return self.attend_rows(*given, growth_length=extra.growth_length)

    def place_latent(
        self, queries: Tensor, vectors: Tensor, norm: Norm, cos: Tensor, sin: Tensor, cache: Vectors, index: Tensor
    ) -> Tensor:
        """Rotate the last numbers of ``queries`` [tokens, heads, plain_dim + rope_dim], maybe in place, and write
        ``vectors`` [tokens, rank + rope_dim], the first numbers normed and the last rotated, to ``index`` int64
        [tokens] of a latent cache [pages, page_size, rank + rope_dim]. -> the queries. ``cos``, ``sin`` [tokens, 1,
        rope_dim].
        """
        rope = cos.shape[-1]
        plain, rotated = queries.split((queries.shape[2] - rope, rope), 2)
        latent, key = vectors.split((vectors.shape[1] - rope, rope), 1)
        heads = torch.cat((rotated, key.unsqueeze(1)), 1)  # the key's rotated part is one more head
        turned = torch.empty_like(heads)
        self.rotate(heads, cos, sin, out=turned)
        write_latent(cache, index, torch.cat((norm(latent.contiguous()), turned[:, -1]), 1))
        return torch.cat((plain, turned[:, :-1]), 2)

    def fits_prologue(self, hidden: int, query_rank: int, heads: int, dims: tuple[int, int, int, int]) -> bool:
        """Whether ``make_latent_prologue`` may take a layer of such sizes. ``dims``: a head's plain, rotated and value
        numbers, and the rank."""
        return False

    def make_latent_prologue(self, weights: LatentWeights) -> LatentPrologue | None:
        """The device's own way from tokens to latent attention, if it has one for such weights."""
        return None

    def hold_latent(self, heads: LatentHeads, spec: Latent) -> int:
        """Make what ``attend_latent`` multiplies with besides ``heads``, over caches of ``spec`` -> its bytes."""
        return 0

    def attend_latent(
        self, queries: Tensor, cache: Vectors, batch: ForwardBatch, heads: LatentHeads, scale: float
    ) -> Tensor:
        """Causal attention of ``queries`` [tokens, heads, plain_dim + rope_dim] over the latent vectors of their rows
        -> [tokens, heads, value_dim]. The vectors of the queries' own tokens are already in the cache.

        Here it reads rows on the host: no pass with it is captured (``plans_latent``).
        """
        if batch.rows is None:
            raise ValueError("attention over latent vectors reads rows on the host; a captured pass has none")
        return attend_latent_heads(queries, cache, batch.rows, heads, scale)

    def choose_tokens(self, queries: Tensor, weights: Tensor, keys: Vectors, batch: ForwardBatch, top_k: int) -> Any:
        """The tokens that each query attends to, at most ``top_k``, for ``attend_chosen``; None: all. Here as
        ``sparse_attention.choose_tokens``."""
        if batch.rows is None:
            raise ValueError("an indexer reads rows on the host; a captured pass has none")
        return choose_tokens(queries, weights, keys, batch.rows, top_k)

    def attend_chosen(
        self, queries: Tensor, cache: Vectors, batch: ForwardBatch, heads: LatentHeads, scale: float, chosen: Any
    ) -> Tensor:
        """As ``attend_latent``, over the ``chosen`` tokens alone."""
        assert batch.rows is not None, "they were chosen from rows on the host"
        absorbed = torch.cat(heads.absorb(queries), 2)
        return heads.expand(attend_chosen(absorbed, cache, batch.rows, heads, scale, chosen))

    def angles(self, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``scale`` times cos and sin of ``positions`` int64 [tokens] times ``frequencies`` float32 [dim], each
        [tokens, 1, dim]."""
        angles = positions.to(torch.float32).view(-1, 1, 1) * frequencies
        cos, sin = angles.cos(), angles.sin()
        if scale != 1.0:
            cos, sin = cos * scale, sin * scale
        return cos.to(dtype), sin.to(dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        """Write the rotated ``x`` [tokens, heads, dim] to ``out``; ``cos``, ``sin`` [tokens, 1, dim]."""
        swapped = x.unflatten(-1, (2, -1)).flip(-2).view(x.shape)
        torch.addcmul(x * cos, swapped, sin, out=out)

    def norm_rope_cache(
        self, qkv: Tensor, heads: int, norm: Norm | None, cos: Tensor, sin: Tensor, cache: Cache, index: Tensor
    ) -> Tensor:
        """Norm and rotate the queries and keys of ``qkv`` [tokens, heads + 2 * kv_heads, dim], in place, and write keys
        and values to ``index`` of the cache. -> the queries [tokens, heads, dim].

        ``norm``: of [tokens, heads + kv_heads, dim], or none. ``cos``, ``sin`` [tokens, 1, dim].
        """
        qk = qkv[:, : (heads + qkv.shape[1]) // 2]
        self.rotate(qk if norm is None else norm(qk), cos, sin, out=qk)
        self.caches.write(cache, index, qkv[:, heads:])
        return qkv[:, :heads]

    def make_qkv_projection(
        self, projection: NormThenLinear, heads: int, kv_heads: int, dim: int, norm: Norm | None
    ) -> QkvProjection[Cache]:
        """A layer's ``projection`` and then ``norm_rope_cache``; one kernel if the device has one for both."""
        return QkvProjection(self, projection, heads, kv_heads, dim, norm)


class QkvProjection(Generic[Cache]):
    """A layer's projection of the normed stream to queries, keys and values, then ``Attention.norm_rope_cache``.

    ``norm``: of the queries and keys, or none.
    """

    def __init__(
        self,
        attention: Attention[Cache, Any],
        projection: NormThenLinear,
        heads: int,
        kv_heads: int,
        dim: int,
        norm: Norm | None,
    ) -> None:
        self.attention, self.projection = attention, projection
        self.heads, self.kv_heads, self.dim, self.norm = heads, kv_heads, dim, norm
        self._norm_rope_cache = attention.norm_rope_cache

    def __call__(
        self, x: PendingResidual, residual: Tensor, cos: Tensor, sin: Tensor, cache: Cache, index: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``x``: the pending summand of ``residual``. -> the queries [tokens, heads, dim] and the sum. May overwrite
        both inputs."""
        projected, total = self.projection.add(x, residual)
        qkv = projected.view(-1, self.heads + 2 * self.kv_heads, self.dim)
        return self._norm_rope_cache(qkv, self.heads, self.norm, cos, sin, cache, index), total
