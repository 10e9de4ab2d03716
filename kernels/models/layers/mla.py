"""Multi-head latent attention (MLA, DeepSeek-AI, arXiv 2405.04434, section 2.1).

    q = queries(x), maybe of norm(down(x));   c, k = split(latent(x));   c = norm(c)
    head h:  key = (W_UK[h] c, rotate(k)),  value = W_UV[h] c

The cache holds (c, rotate(k)) of each token, the same on all ranks, which divide the heads. ``W_UK`` and ``W_UV`` are
held in floats: devices multiply queries with the former and results with the latter, in place of keys and values with
both, where that takes less time (``Attention.attend_latent``). With context parallelism every rank has all heads.
A layer may have no positions, where ``rope_dim`` is 0, or read the vectors of another one (``LatentConfig.reads``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.contract.caches import CacheGroup
from kernels.core.batch import ForwardBatch
from kernels.core.operators import Linear
from kernels.devices.latent_attention import AdaptedLatentHeads, LatentHeads, LatentPrologue, LatentWeights
from kernels.devices.latent_cache import IndexedLatent, Vectors, write_latent
from kernels.models.config import LatentConfig, ModelConfig
from kernels.models.layers import query_scale
from kernels.models.layers.builder import LayerBuilder
from kernels.models.layers.indexer import Indexer
from kernels.models.layers.query_scale import QueryScale
from kernels.models.layers.rotary import grow, rotary_order
from kernels.weights.tensors import Role, Split, TensorSpec, by_inputs, by_outputs, linear, norm

__all__ = ["LatentAttention", "attention", "caches", "tensors"]


def tensors(config: ModelConfig, module: str, gguf: str) -> Iterator[TensorSpec]:
    """The projections of queries and latent vectors, their norms, and the output. ``gguf``: what their names begin with
    there."""
    latent, hidden, heads = _sizes(config), config.hidden_size, config.heads
    queries, rank, bias = latent.plain_dim + latent.rope_dim, latent.query_rank, config.qkv_bias

    def split(length: int) -> Split | None:
        return None if latent.whole else by_outputs((length, heads))

    by_head = split(heads * queries)
    if rank:
        yield from linear(f"{module}.q_a_proj", (rank, hidden), None, f"{gguf}_q_a", bias=bias)
        yield norm(f"{module}.q_a_layernorm", rank, f"{gguf}_q_a_norm")
        yield from linear(f"{module}.q_b_proj", (heads * queries, rank), by_head, f"{gguf}_q_b")
    else:
        yield from linear(f"{module}.q_proj", (heads * queries, hidden), by_head, f"{gguf}_q")
    if latent.scaled:
        yield from query_scale.tensors(module, heads, split(heads))
    if not latent.reads:
        width = latent.rank + latent.rope_dim
        yield from linear(f"{module}.kv_a_proj_with_mqa", (width, hidden), None, f"{gguf}_kv_a_mqa", bias=bias)
        yield norm(f"{module}.kv_a_layernorm", latent.rank, f"{gguf}_kv_a_norm")
    both, values = heads * (latent.plain_dim + latent.value_dim), heads * latent.value_dim
    if latent.apart:
        keys = heads * latent.rank
        yield from linear(f"{module}.k_b_proj", (keys, latent.plain_dim), split(keys), f"{gguf}_k_b")
        yield from linear(f"{module}.v_b_proj", (values, latent.rank), split(values), f"{gguf}_v_b")
    else:
        yield from linear(f"{module}.kv_b_proj", (both, latent.rank), split(both), f"{gguf}_kv_b")
    if config.sinks:
        yield TensorSpec(f"{module}.sinks", (heads,), Role.WIDE, split(heads))
    outputs = None if latent.whole else by_inputs(values, heads)
    yield from linear(f"{module}.o_proj", (hidden, values), outputs, f"{gguf}_output", bias=config.output_bias)


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """One vector of each token, in every layer."""
    return (CacheGroup(_sizes(config).spec(), tuple(range(config.layers))),)


def attention(
    builder: LayerBuilder, config: ModelConfig, module: str, window: int, indexer: Indexer | None = None
) -> LatentAttention:
    """The layer of ``tensors``, without a ``window``."""
    assert not window, "latent attention sees all tokens"
    return LatentAttention(builder, config, module, indexer)


class LatentAttention:
    """The layer of ``tensors``: attention of normed tokens, projected back. ``indexer``: chooses what is attended to,
    in this layer or in one before it; None: all tokens are. ``output``: in place of the projection back."""

    def __init__(
        self,
        builder: LayerBuilder,
        config: ModelConfig,
        module: str,
        indexer: Indexer | None = None,
        output: Linear | None = None,
    ) -> None:
        self.indexer, self.module = indexer, module
        self.sizes = latent = _sizes(config)
        self.attention, self.rows = builder.ops.attention, builder.rows
        self.norms_views = builder.ops.elementwise.norms_views
        self.without_program = builder.ops.elementwise.without_program()
        self.heads, self.scale, self.growth = config.heads, config.attention_scale, config.query_growth
        self.has_sinks = config.sinks
        self.scaling = QueryScale(builder, module) if latent.scaled else None
        self.norm = None if latent.reads else builder.norm(f"{module}.kv_a_layernorm", latent.norm_eps)
        self.expansion = self._expansion(builder, module)
        builder.ops.linear.dequantized_bytes += self.attention.hold_latent(self.expansion, latent.spec())
        self.adapted = self._make_adapted(builder, f"{module}.kv_b_proj")
        self.query_norm = builder.norm(f"{module}.q_a_layernorm", latent.norm_eps) if latent.query_rank else None
        self.queries: Linear | None = None
        self.prologue = None if indexer is not None else self._make_prologue(builder, config, module)
        if self.prologue is None:
            self._make_projections(builder, config, module)
        self.context = builder.context_parallel
        self.output = output or (builder.linear if latent.whole else builder.row_parallel)(f"{module}.o_proj")

    def _make_prologue(self, builder: LayerBuilder, config: ModelConfig, module: str) -> LatentPrologue | None:
        """The device's own way to attention, if it has one for this layer."""
        latent, heads = self.sizes, self.heads
        dims = latent.plain_dim, latent.rope_dim, latent.value_dim, latent.rank
        plain = config.rope_interleaved and not config.qkv_bias and self.growth is None and self.rows is None
        if not plain or not self.attention.fits_prologue(config.hidden_size, latent.query_rank, heads, dims):
            return None
        if self.query_norm is None or self.norm is None:
            return None
        names = (f"{module}.q_a_proj", f"{module}.q_b_proj", f"{module}.kv_a_proj_with_mqa")
        down, up, vectors = (builder.source.projection([name]) for name in names)
        if isinstance(down, tuple) or isinstance(up, tuple) or isinstance(vectors, tuple):
            return None
        weights = LatentWeights(down, up, vectors, self.query_norm, self.norm, self.expansion)
        result = self.attention.make_latent_prologue(weights)
        self.queries = None if result is None else result.queries
        return result

    def _make_projections(self, builder: LayerBuilder, config: ModelConfig, module: str) -> None:
        latent, first = self.sizes, "q_proj"
        order = _head_order(config, latent.plain_dim, config.heads)
        if latent.query_rank:
            self.queries = _ordered(builder, order, f"{module}.q_b_proj")
            first, order = "q_a_proj", list(range(latent.query_rank))
        names, self.split = [f"{module}.{first}"], len(order)
        if not latent.reads:
            names.append(f"{module}.kv_a_proj_with_mqa")
            vectors = _head_order(config, latent.rank, 1, self.attention.pairs_latent)
            order = [*order, *(self.split + place for place in vectors)]
        self.down = _ordered(builder, order, *names)

    def _expansion(self, builder: LayerBuilder, module: str) -> LatentHeads:
        latent, heads = self.sizes, self.heads
        if latent.apart:  # keys with their inputs and outputs exchanged
            keys = _floats(builder, f"{module}.k_b_proj").view(heads, latent.rank, latent.plain_dim).transpose(1, 2)
            values = _floats(builder, f"{module}.v_b_proj").view(heads, latent.value_dim, latent.rank)
        else:
            both = _floats(builder, f"{module}.kv_b_proj").view(heads, -1, latent.rank)
            keys, values = both.split((latent.plain_dim, latent.value_dim), 1)
        if latent.factor != 1.0:
            keys, values = keys * latent.factor, values * latent.factor
        sinks = builder.source.take([f"{module}.sinks"]) if self.has_sinks else None
        return LatentHeads(keys.contiguous(), values.transpose(1, 2).contiguous(), sinks)

    def _make_adapted(self, builder: LayerBuilder, module: str) -> AdaptedLatentHeads | None:
        """The expansion with what adapters add to it."""
        if self.rows is None:
            return None
        if self.sizes.apart:
            builder.refuse_adapters((module,), "this file stores keys and values as separate modules")
            return None
        if self.attention.invariant_latent:
            reason = "its products of a row depend on other rows; leave --enable-deterministic-inference out"
            builder.refuse_adapters((module,), reason)
            return None
        places = self.rows.adapters.make_latent(module, self.rows)
        return None if places is None else AdaptedLatentHeads(self.expansion, self.rows, *places, self.sizes.factor)

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Any, batch: ForwardBatch, wanted: Tensor | None
    ) -> Tensor:
        """As ``AttentionLayer``."""
        attention, indexer, compressed = self.attention, self.indexer, None
        if self.prologue is not None:
            result = self.prologue.attend(x, cos, sin, cache, batch, self.scale)
            if result is not None:
                return self._project_back(result.flatten(1), wanted)
            queries, vectors = self.prologue.project(x)
        else:
            queries, vectors = self.down(x).tensor_split((self.split,), 1)
        if self.queries is not None and self.query_norm is not None:
            compressed = self.query_norm(queries if self.norms_views else queries.contiguous())
            queries = self.queries(compressed)
        cache, keys = _parts(cache)
        if indexer is not None and indexer.module == self.module:
            assert keys is not None, "of every layer with an indexer"
            indexer.choose(x, compressed, cos, sin, keys, batch)
        queries = self._place(queries.view(len(x), self.heads, -1), vectors, cos, sin, cache, batch.cache_index)
        if self.scaling is not None:
            queries = self.scaling(self.without_program(queries), batch.positions)
        if self.growth is not None:
            queries = grow(self.without_program(queries), batch.positions, self.growth)
        adapted = None if self.rows is None or self.rows.idle else self.adapted
        heads = self.expansion
        if adapted is not None:
            queries, heads = adapted.absorb(self.without_program(queries)), adapted.in_space
        if indexer is None or indexer.chosen is None:
            result = attention.attend_latent(queries, cache, batch, heads, self.scale)
        else:
            result = attention.attend_chosen(queries, cache, batch, heads, self.scale, indexer.chosen)
        if adapted is not None:
            result = adapted.expand(result)
        return self._project_back(result.flatten(1), wanted)

    def _place(
        self, queries: Tensor, vectors: Tensor, cos: Tensor, sin: Tensor, cache: Vectors, index: Tensor
    ) -> Tensor:
        """As ``Attention.place_latent``, also of a layer without positions, or that reads another's vectors."""
        rotated = self.sizes.rope_dim
        if self.norm is None:
            if not rotated:
                return queries
            plain, heads = queries.split((queries.shape[2] - rotated, rotated), 2)
            turned = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
            self.attention.rotate(heads.contiguous(), cos, sin, out=turned)
            return torch.cat((plain, turned), 2)
        if rotated:
            queries = self.attention.place_latent(queries, vectors, self.norm, cos, sin, cache, index)
        else:
            write_latent(cache, index, self.norm(vectors.contiguous()))
        if self.context is not None:
            self.context.share(cache)
        return queries

    def _project_back(self, result: Tensor, wanted: Tensor | None) -> Tensor:
        if wanted is not None:
            if self.rows is not None:
                self.rows.select(wanted)
            result = result.index_select(0, wanted) if self.context is None else self.context.take(result, wanted)
        return self.output(result)


def _parts(cache: Any) -> tuple[Vectors, Vectors | None]:
    """The vectors that a layer reads, and the index keys that it writes, of its cache: of one that reads another's
    vectors, that one's cache with the keys of its own."""
    read, keys = cache if isinstance(cache, tuple) else (cache, None)
    if isinstance(read, IndexedLatent):
        return read.vectors, read.keys if keys is None else keys
    return read, keys


def _floats(builder: LayerBuilder, module: str) -> Tensor:
    """The weight of a module, in floats."""
    weight = builder.source.projection([module])
    assert not isinstance(weight, tuple), "one module has one weight"
    if isinstance(weight, Tensor):
        return weight
    dense = builder.ops.linear.dequantize(weight, weight.dtype)
    builder.ops.linear.dequantized_bytes += dense.nbytes - weight.nbytes
    return dense


def _sizes(config: ModelConfig) -> LatentConfig:
    assert config.latent is not None, "the family reads config.json by latent_decoder"
    return config.latent


def _head_order(config: ModelConfig, before: int, heads: int, pairs: bool = False) -> list[int]:
    """The order of the outputs of ``heads`` in which the halves of their rotated parts, which follow ``before`` others,
    rotate against one another, or with ``pairs`` neighbors."""
    rotated = _sizes(config).rope_dim
    if pairs:
        neighbors = [place // 2 + rotated // 2 * (place % 2) for place in range(rotated)]
        order = list(range(rotated)) if config.rope_interleaved else neighbors
    else:
        order = rotary_order(rotated, rotated, config.rope_interleaved) or list(range(rotated))
    head = [*range(before), *(before + place for place in order)]
    return [index * len(head) + place for index in range(heads) for place in head]


def _ordered(builder: LayerBuilder, order: Sequence[int], *modules: str) -> Linear:
    return builder.linear(*modules) if list(order) == list(range(len(order))) else builder.ordered(order, *modules)
