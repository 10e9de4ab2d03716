"""A decoder layer whose norms stand before or after attention and feed-forward layer, or both; or whose two halves read
the same norm.

    h = h + s * after_attention(attention(before_attention(h)));  h = h + s * after_mlp(mlp(before_mlp(h)))
    parallel:  n = before_attention(h);  h = h + s * (attention(n) + mlp(n))

``s`` is the model's residual scale. The layer of Llama, whose norms only stand before, is ``pre_norm``: devices fuse
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.core.batch import ForwardBatch
from kernels.core.operators import Linear, Norm, PendingResidual
from kernels.devices.linear import norm_of_sum
from kernels.devices.row_attention import CapAndSinks
from kernels.models.config import ModelConfig, QueryGrowth
from kernels.models.layers import gqa
from kernels.models.layers.builder import LayerBuilder
from kernels.models.layers.rotary import alibi_slopes, grow

__all__ = [
    "AttentionLayer",
    "Block",
    "Norms",
    "SelfAttention",
    "attention",
    "gated_mlp",
    "plain_mlp",
    "wide_attention",
    "wide_norm",
]


@dataclass(frozen=True)
class Norms:
    """The norms of a layer; None: there is none."""

    before_attention: Norm | None = None
    after_attention: Norm | None = None
    before_mlp: Norm | None = None
    after_mlp: Norm | None = None


class AttentionLayer(Protocol):
    """Attention of normed tokens, projected back."""

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Any, batch: ForwardBatch, wanted: Tensor | None
    ) -> Tensor:
        """``x`` [tokens, hidden] -> [tokens, hidden], of the tokens ``wanted`` int64 [rows] alone if it is given."""
        ...


class SelfAttention:
    """Attention of normed tokens, projected back. ``qkv``: the heads of queries, keys and values. ``norm``: of query
    and key heads. ``sinks`` float32 [heads]: as ``CapAndSinks``. ``weights`` [dim]: of the rotated queries.
    ``growth``: of these, too. ``plain``: ``Attention.attend_rows`` computes it in any case."""

    def __init__(
        self,
        builder: LayerBuilder,
        config: ModelConfig,
        qkv: Linear,
        output: Linear,
        window: int,
        *,
        norm: Norm | None = None,
        sinks: Tensor | None = None,
        weights: Tensor | None = None,
        growth: QueryGrowth | None = None,
        plain: bool = False,
    ) -> None:
        self.attention, self.rows, self.qkv, self.output = builder.ops.attention, builder.rows, qkv, output
        self.heads, self.total, self.dim = config.heads, config.heads + 2 * config.kv_heads, config.head_dim
        self.window, self.norm = window, norm
        self.scale = config.attention_scale or config.head_dim**-0.5
        without_program = builder.ops.elementwise.without_program()
        self.extra = CapAndSinks(config.attention_softcap, sinks, config.growth_length)
        self.weights, self.growth = weights, growth
        self.slopes = None
        if config.alibi:
            slopes = alibi_slopes(config.heads * builder.mesh.size)[builder.mesh.rank * config.heads :][: config.heads]
            self.slopes = torch.tensor(slopes, device=builder.ops.torch_device)
        self._unrecorded = None if weights is None and growth is None else without_program  # programs scale no queries
        self._capped, self._in_chunks = not self.extra.is_plain or config.alibi, window < 0
        # What reads the host's rows is not captured.
        eager = plain or (self._capped and config.eager_with(self.attention.plans))
        self._uncaptured = without_program if eager else None

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Any, batch: ForwardBatch, wanted: Tensor | None
    ) -> Tensor:
        """As ``AttentionLayer``."""
        heads = self.qkv(x).view(-1, self.total, self.dim)
        queries = self.attention.norm_rope_cache(heads, self.heads, self.norm, cos, sin, cache, batch.cache_index)
        if self._unrecorded is not None:
            queries = self._scaled(self._unrecorded(queries), batch.positions)
        if self._uncaptured is not None or (self._in_chunks and batch.plans[self.window] is None):
            queries = queries if self._uncaptured is None else self._uncaptured(queries)
            rows, extra = batch.rows, self.extra
            assert rows is not None, "such attention is part of no captured pass"
            result = self.attention.attend_rows(
                queries,
                cache,
                rows,
                self.window,
                self.scale,
                extra.cap,
                extra.sinks,
                slopes=self.slopes,
                growth_length=extra.growth_length,
            )
        elif not self._capped:
            result = self.attention.attend(queries, cache, batch.plans[self.window], self.scale)
        else:
            result = self.attention.attend_capped(queries, cache, batch, self.window, self.scale, self.extra)
        if wanted is not None:
            if self.rows is not None:
                self.rows.select(wanted)
            result = result.index_select(0, wanted)
        return self.output(result)

    def _scaled(self, queries: Tensor, positions: Tensor) -> Tensor:
        if self.weights is not None:
            queries = queries * self.weights
        return queries if self.growth is None else grow(queries, positions, self.growth)


def attention(
    builder: LayerBuilder, config: ModelConfig, module: str, window: int, norm: Norm | None = None
) -> SelfAttention:
    """The layer of ``gqa.tensors``. ``norm``: of query and key heads, if it is another than theirs."""
    if config.qk_norm and norm is None:
        names, counts = (f"{module}.q_norm", f"{module}.k_norm"), (config.heads, config.kv_heads)
        norm = builder.head_norms(
            *names, *counts, config.norm_eps, order=gqa.head_order(config), offset=config.norm_offset
        )
    qkv = gqa.projection(builder, config, f"{module}.q_proj", f"{module}.k_proj", f"{module}.v_proj")
    sinks = builder.source.take([f"{module}.sinks"]) if config.sinks else None
    output, growth = builder.row_parallel(f"{module}.o_proj"), config.query_growth
    return SelfAttention(builder, config, qkv, output, window, norm=norm, sinks=sinks, growth=growth)


def wide_attention(builder: LayerBuilder, config: ModelConfig, module: str, window: int) -> SelfAttention:
    """The layer of ``gqa.tensors`` with norms over the width of all query heads, and of all key heads."""
    elementwise, total = builder.ops.elementwise, (config.heads + 2 * config.kv_heads) * config.head_dim
    order = gqa.head_order(config)
    norms, projections = [], []
    for part, count in (("q", config.heads), ("k", config.kv_heads)):
        places = None
        if order is not None:
            places = [head * config.head_dim + place for head in range(count) for place in order]
        name = f"{module}.{part}_proj"
        projections.append(builder.linear(name) if places is None else builder.ordered(places, name))
        norms.append(wide_norm(builder, f"{module}.{part}_norm", config.norm_eps, places))
    projections.append(builder.linear(f"{module}.v_proj"))
    first = config.heads * config.head_dim
    last = first + config.kv_heads * config.head_dim

    def qkv(x: Tensor) -> Tensor:
        queries, keys, values = (projection(x) for projection in projections)
        out = elementwise.empty_rows(len(x), total, x.dtype)
        elementwise.add_rows(norms[0](queries), None, out[:, :first])
        elementwise.add_rows(norms[1](keys), None, out[:, first:last])
        elementwise.add_rows(values, None, out[:, last:])
        return out

    output = builder.row_parallel(f"{module}.o_proj")
    return SelfAttention(builder, config, gqa.clipped(builder, config, qkv), output, window)


def wide_norm(builder: LayerBuilder, module: str, eps: float, order: Sequence[int] | None = None) -> Norm | Linear:
    """A norm over the width of all heads, of which each rank has some. ``order``: of its numbers."""
    mesh = builder.mesh
    if mesh.size == 1 and order is None:
        return builder.norm(module, eps)
    weight = builder.source.take([f"{module}.weight"])
    if order is not None:
        weight = weight[list(order)]
    if mesh.size == 1:
        return builder.ops.elementwise.make_norm(weight, eps)

    def normed(x: Tensor) -> Tensor:
        wide = x.float()
        mean = mesh.all_reduce(wide.pow(2).mean(-1, keepdim=True)) / mesh.size
        return (weight * wide * torch.rsqrt(mean + eps)).to(x.dtype)

    return normed


def gated_mlp(builder: LayerBuilder, config: ModelConfig, module: str, *gate_up: str) -> Linear:
    """``down(activation(gate(x)) * up(x))``, the layer of ``mlp.tensors``. ``gate_up``: the name of one projection for
    both."""
    names = [f"{module}.{name}" for name in gate_up or ("gate_proj", "up_proj")]
    inner, down = builder.gated(*names, activation=config.activation), builder.row_parallel(f"{module}.down_proj")
    return lambda x: down(inner(x))


def plain_mlp(builder: LayerBuilder, config: ModelConfig, up: str, down: str) -> Linear:
    """``down(activation(up(x)))``."""
    inner = builder.ops.elementwise.activate(builder.linear(up), config.activation)
    outer = builder.row_parallel(down)
    return lambda x: outer(inner(x))


class Block:
    """A layer of the forms above."""

    def __init__(
        self,
        builder: LayerBuilder,
        config: ModelConfig,
        attention: AttentionLayer,
        mlp: Linear,
        norms: Norms,
        parallel_residual: bool = False,
    ) -> None:
        self.elementwise = builder.ops.elementwise
        self.context = context = builder.context_parallel
        self.attention, self.norms, self.parallel_residual = attention, norms, parallel_residual
        self.mlp = mlp if context is None else context.around(mlp, builder.rows)
        factor = config.residual_scale
        self._scale = builder.ops.elementwise.compose(lambda x: x * factor, lambda x: x) if factor != 1.0 else None

    @property
    def first_norm(self) -> Norm | None:
        """The norm that reads the residual stream first."""
        return self.norms.before_attention

    def set_next_norm(self, norm: Norm) -> None:
        """Nothing: no product of this layer is fused with the norm after it."""

    def __call__(
        self,
        x: PendingResidual,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: Any,
        batch: ForwardBatch,
        wanted: Tensor | None = None,
    ) -> tuple[PendingResidual, Tensor]:
        """As ``DecoderLayer``."""
        norms = self.norms
        if norms.before_attention is None:
            normed = residual = self.elementwise.add_pending(x, residual)
        else:
            normed, residual = norm_of_sum(norms.before_attention, x, residual)
        result = self.attention(normed, cos, sin, cache, batch, wanted)
        if wanted is not None:
            if self.context is None:
                normed, residual = normed.index_select(0, wanted), residual.index_select(0, wanted)
            else:
                normed, residual = self.context.take(normed, wanted), self.context.take(residual, wanted)
                self.context.leave()
        if self.parallel_residual:
            result = self.elementwise.add_pending(result, self.mlp(normed))
            return self._summand(result, None), residual
        result = self._summand(result, norms.after_attention)
        if norms.before_mlp is None:
            normed = residual = self.elementwise.add_pending(result, residual)
        else:
            normed, residual = norms.before_mlp.add(result, residual)
        return self._summand(self.mlp(normed), norms.after_mlp), residual

    def _summand(self, x: Tensor, norm: Norm | None) -> Tensor:
        x = x if norm is None else norm(x)
        return x if self._scale is None else self._scale(x)
