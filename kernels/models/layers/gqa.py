"""Grouped-query attention over the paged cache (Ainslie et al., arXiv 2305.13245)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kernels.contract.caches import CacheGroup, Paged, Window
from kernels.core.batch import ForwardBatch
from kernels.core.operators import Linear, Norm, PendingResidual
from kernels.devices.attention import QkvProjection
from kernels.devices.linear import NormThenLinear, ResidualLinear
from kernels.models.config import ModelConfig
from kernels.models.layers.builder import LayerBuilder
from kernels.models.layers.rotary import rotary_order
from kernels.weights.tensors import GgufPlace, Role, TensorSpec, by_inputs, by_outputs, linear, norm

__all__ = [
    "Attention",
    "Heads",
    "attention",
    "caches",
    "clipped",
    "head_order",
    "interleaved_tensors",
    "projection",
    "tensors",
    "wide_tensors",
]


def tensors(config: ModelConfig, module: str, gguf: str, interleaved: bool = False) -> Iterator[TensorSpec]:
    """``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj``, and the norms of query and key heads where there are any.

    ``gguf``: what their names begin with there. ``interleaved``: the file interleaves the halves of each head.
    """
    hidden, heads, kv_heads, dim = config.hidden_size, config.heads, config.kv_heads, config.head_dim
    queries, keys = heads * dim, kv_heads * dim
    bias, by_head, by_key_head = config.qkv_bias, by_outputs((queries, heads)), by_outputs((keys, kv_heads))
    rotary, rotary_keys = (heads, kv_heads) if interleaved else (0, 0)
    yield from linear(f"{module}.q_proj", (queries, hidden), by_head, f"{gguf}_q", bias=bias, rotary_heads=rotary)
    yield from linear(f"{module}.k_proj", (keys, hidden), by_key_head, f"{gguf}_k", bias=bias, rotary_heads=rotary_keys)
    yield from linear(f"{module}.v_proj", (keys, hidden), by_key_head, f"{gguf}_v", bias=bias)
    yield from linear(
        f"{module}.o_proj", (hidden, queries), by_inputs(queries, heads), f"{gguf}_output", bias=config.output_bias
    )
    if config.sinks:
        place = GgufPlace(f"{gguf}_sinks.weight")
        yield TensorSpec(f"{module}.sinks", (heads,), Role.WIDE, by_outputs((heads, heads)), place)
    if config.qk_norm:
        yield norm(f"{module}.q_norm", dim, f"{gguf}_q_norm")
        yield norm(f"{module}.k_norm", dim, f"{gguf}_k_norm")


def interleaved_tensors(config: ModelConfig, module: str, gguf: str) -> Iterator[TensorSpec]:
    """``tensors`` of a family whose GGUF files interleave the halves of each head."""
    return tensors(config, module, gguf, interleaved=True)


def wide_tensors(config: ModelConfig, module: str, gguf: str) -> Iterator[TensorSpec]:
    """``tensors`` with norms over the width of all query heads, and of all key heads."""
    yield from tensors(config, module, gguf)
    for part, count in (("q", config.heads), ("k", config.kv_heads)):
        width = count * config.head_dim
        yield norm(f"{module}.{part}_norm", width, f"{gguf}_{part}_norm", by_outputs((width, count)))


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """Keys and values of all tokens, or of a window in layers that have one."""
    paged = Paged(config.kv_heads, config.head_dim, config.head_dim)
    return tuple(
        CacheGroup(
            Window(paged, abs(window), window < 0) if window else paged,
            tuple(layer for layer, other in enumerate(config.windows) if other == window),
        )
        for window in dict.fromkeys(config.windows)
    )


def head_order(config: ModelConfig) -> list[int] | None:
    """The order of each head's numbers in which halves rotate against one another; None: as they are stored."""
    return rotary_order(config.head_dim, config.rotary_dim, config.rope_interleaved)


def projection(builder: LayerBuilder, config: ModelConfig, *modules: str) -> Linear:
    """Queries, keys and values of ``modules``, the numbers of each query and key head in ``head_order``."""
    order, dim, rotated = head_order(config), config.head_dim, config.heads + config.kv_heads
    if order is None:
        return clipped(builder, config, builder.linear(*modules))
    places = [head * dim + place for head in range(rotated) for place in order]
    places += range(rotated * dim, (rotated + config.kv_heads) * dim)
    return clipped(builder, config, builder.ordered(places, *modules))


def clipped(builder: LayerBuilder, config: ModelConfig, projection: Linear) -> Linear:
    """``projection`` of queries, keys and values, clamped where the model does so."""
    limit = config.qkv_clip
    if not limit:
        return projection
    return builder.ops.elementwise.compose(lambda x: projection(x).clamp_(-limit, limit), lambda x: x)


def attention(builder: LayerBuilder, config: ModelConfig, module: str, window: int) -> Attention:
    """The layer of ``tensors``. ``window``: tokens that a query sees, 0 for all."""
    norms = None
    if config.qk_norm:
        names = f"{module}.q_norm", f"{module}.k_norm"
        counts = config.heads, config.kv_heads
        norms = builder.head_norms(
            *names, *counts, config.norm_eps, order=head_order(config), offset=config.norm_offset
        )
    return Attention(
        builder,
        Heads(config.heads, config.kv_heads, config.head_dim),
        projection(builder, config, f"{module}.q_proj", f"{module}.k_proj", f"{module}.v_proj"),
        builder.into_stream(f"{module}.o_proj"),
        window,
        norms=norms,
        scale=config.attention_scale,
    )


@dataclass(frozen=True)
class Heads:
    """Query and key heads of this rank, each of ``dim`` numbers."""

    count: int
    kv_count: int
    dim: int


class Attention:
    """``qkv``: the heads of queries, keys and values, in this order. ``norms``: of query and key heads. ``scale``: of
    queries times keys; 0: ``dim ** -0.5``."""

    def __init__(
        self,
        builder: LayerBuilder,
        heads: Heads,
        qkv: Linear,
        output: ResidualLinear,
        window: int,
        *,
        norms: Norm | None = None,
        scale: float = 0.0,
    ) -> None:
        self._make_qkv_projection, self._attend = (
            builder.ops.attention.make_qkv_projection,
            builder.ops.attention.attend,
        )
        self.heads, self.qkv, self.output, self.window, self.head_norms = heads, qkv, output, window, norms
        self.scale, self.rows = scale or heads.dim**-0.5, builder.rows

    def after_norm(self, projection: NormThenLinear) -> QkvProjection[Any]:
        """All from ``projection``, of ``qkv``, up to attention."""
        heads = self.heads
        return self._make_qkv_projection(projection, heads.count, heads.kv_count, heads.dim, self.head_norms)

    def forward(
        self, queries: Tensor, residual: Tensor, cache: Any, batch: ForwardBatch, wanted: Tensor | None = None
    ) -> tuple[PendingResidual, Tensor]:
        """Attention of the rotated ``queries`` [tokens, heads, dim], projected into the ``residual`` stream, as
        ``ResidualLinear`` returns it. ``wanted`` int64 [rows]: of these tokens alone."""
        result = self._attend(queries, cache, batch.plans[self.window], self.scale)
        if wanted is not None:
            if self.rows is not None:
                self.rows.select(wanted)
            result, residual = result.index_select(0, wanted), residual.index_select(0, wanted)
        return self.output(result, residual)
