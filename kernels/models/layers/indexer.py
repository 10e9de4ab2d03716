"""The lightning indexer of sparse attention (DeepSeek-AI, arXiv 2512.02556, section 2.1).

    q = rotate(queries(c));   k = rotate(norm(keys(x)));   w = weights(x) / sqrt(heads * dim)

``c`` is the compressed vector that attention's queries are made from, or ``norm(x)`` (``IndexConfig.own_queries``),
whose queries are scaled then. The first numbers of each head are rotated, or the last ones, of a layer with positions.
All ranks have the whole indexer, and choose the same tokens; with context parallelism each chooses for its own queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernels.core.batch import ForwardBatch
from kernels.devices.latent_cache import Vectors, write_latent
from kernels.models.config import IndexConfig
from kernels.models.layers import query_scale
from kernels.models.layers.builder import LayerBuilder
from kernels.models.layers.query_scale import QueryScale
from kernels.models.layers.rotary import rotary_order
from kernels.weights.tensors import Role, TensorSpec, biased_norm, linear

__all__ = ["Indexer", "tensors"]


def tensors(index: IndexConfig, module: str, hidden: int, query_rank: int, layer: str = "") -> Iterator[TensorSpec]:
    """The projections of an attention layer's indexer, and its norms. ``layer``: its name in GGUF files."""
    own, gguf = f"{module}.indexer", f"{layer}.indexer"
    if index.own_queries:
        query_rank = hidden
        yield from biased_norm(f"{own}.q_input_norm", hidden)
        yield from query_scale.tensors(own, index.heads)
    yield from linear(f"{own}.wq_b", (index.heads * index.dim, query_rank), None, f"{gguf}.attn_q_b")
    yield from linear(f"{own}.wk", (index.dim, hidden), None, f"{gguf}.attn_k")
    yield from biased_norm(f"{own}.k_norm", index.dim, f"{gguf}.k_norm")
    yield from linear(f"{own}.weights_proj", (index.heads, hidden), None, f"{gguf}.proj", role=Role.ROUTER)


class Indexer:
    """The indexer of the attention layer ``module``.

    ``chosen``: what it chose in this pass, for that layer and for those after it that have no indexer of their own.
    """

    def __init__(self, builder: LayerBuilder, index: IndexConfig, module: str, rope_dim: int) -> None:
        self.module, self.index = module, index
        self.chosen: Any = None
        self.attention, name = builder.ops.attention, f"{module}.indexer"
        self.context = builder.context_parallel
        self._queries, self._keys = builder.linear(f"{name}.wq_b"), builder.linear(f"{name}.wk")
        self._norm = builder.layer_norm(f"{name}.k_norm", eps=index.norm_eps)
        self._weights = builder.linear(f"{name}.weights_proj")
        self._query_norm = builder.layer_norm(f"{name}.q_input_norm", eps=index.norm_eps) if index.own_queries else None
        self._query_scale = QueryScale(builder, name) if index.own_queries else None
        self._scale = (index.heads * index.dim) ** -0.5
        order = rotary_order(rope_dim, rope_dim, index.rope_interleaved)
        self._order = None if order is None else torch.tensor(order, device=builder.ops.torch_device)
        self._rope = rope_dim

    def choose(
        self, x: Tensor, compressed: Tensor | None, cos: Tensor, sin: Tensor, keys: Vectors, batch: ForwardBatch
    ) -> None:
        """Write the keys of ``x`` [tokens, hidden] to the cache ``keys`` [pages, page_size, dim], and choose the tokens
        that queries attend to. ``compressed``: [tokens, query_rank], of an indexer whose queries are made from it."""
        index = self.index
        given = compressed if self._query_norm is None else self._query_norm(x)
        assert given is not None, "queries are made from one or the other"
        queries = self._queries(given).view(len(x), index.heads, index.dim)
        if self._query_scale is not None:
            queries = self._query_scale(queries, batch.positions)
        heads = torch.cat((queries, self._norm(self._keys(x)).unsqueeze(1)), 1)
        if self._rope:
            turned, others = self._parts(heads)
            turned = turned.contiguous() if self._order is None else turned.index_select(2, self._order)
            rotated = torch.empty_like(turned)
            self.attention.rotate(turned, cos, sin, out=rotated)
            heads = torch.cat((rotated, others), 2)  # as keys and queries have one order, scores are the same
        write_latent(keys, batch.cache_index, heads[:, -1])
        if self.context is not None:
            self.context.share(keys)
        weights = self._weights(x).float() * self._scale
        self.chosen = self.attention.choose_tokens(heads[:, :-1], weights, keys, batch, index.chosen)

    def _parts(self, heads: Tensor) -> tuple[Tensor, Tensor]:
        """What is rotated of ``heads`` [tokens, heads, dim], and what is not."""
        if not self.index.rotates_last:
            return heads[..., : self._rope], heads[..., self._rope :]
        others, turned = heads.tensor_split((-self._rope,), 2)
        return turned, others
