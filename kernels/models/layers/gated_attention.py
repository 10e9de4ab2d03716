"""Attention whose results gates weight: ``output(sigmoid(gate) * attention)`` (Qiu et al., arXiv 2505.06708)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernels.core.batch import ForwardBatch
from kernels.models.config import ModelConfig
from kernels.models.layers import gqa
from kernels.models.layers.block import AttentionLayer, SelfAttention
from kernels.models.layers.builder import LayerBuilder
from kernels.weights.tensors import TensorSpec, by_outputs

__all__ = ["ApartGates", "GatedAttention", "GatedHeads", "apart_gated", "tensors"]


def tensors(config: ModelConfig, module: str, gguf: str) -> Iterator[TensorSpec]:
    """Those of ``gqa.tensors``, with twice the outputs of ``q_proj``."""
    heads, wide = config.heads, 2 * config.heads * config.head_dim
    for spec in gqa.tensors(config, module, gguf):
        if spec.module == f"{module}.q_proj":
            shape, split = (wide, *spec.shape[1:]), by_outputs((wide, heads))
            spec = dataclasses.replace(spec, shape=shape, split=split)
        yield spec


class GatedHeads:
    """The heads of queries, ``count`` of them, of keys and of values, and the gates of the results. ``q_proj`` gives
    the queries and gates, head by head. ``norm``: of query and key heads."""

    def __init__(self, builder: LayerBuilder, config: ModelConfig, module: str) -> None:
        heads, kv_heads, dim = config.heads, config.kv_heads, config.head_dim
        head = gqa.head_order(config) or list(range(dim))
        first = 2 * heads * dim  # of keys
        order = [index * 2 * dim + place for index in range(heads) for place in head]
        order += [first + index * dim + place for index in range(kv_heads) for place in head]
        order += range(first + kv_heads * dim, first + 2 * kv_heads * dim)
        self._width, self._shape, self.count = len(order), (heads + 2 * kv_heads, dim), heads
        order += [index * 2 * dim + dim + place for index in range(heads) for place in range(dim)]
        names = (f"{module}.{part}_proj" for part in ("q", "k", "v"))
        self._inputs = builder.ordered(order, *names)
        self.norm = builder.head_norms(
            f"{module}.q_norm",
            f"{module}.k_norm",
            heads,
            kv_heads,
            config.norm_eps,
            order=head,
            offset=config.norm_offset,
        )

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` [tokens, hidden] -> heads [tokens, heads + 2 * kv_heads, dim], gates [tokens, heads * dim]."""
        heads, gates = self._inputs(x).tensor_split((self._width,), 1)
        return heads.contiguous().view(-1, *self._shape), gates


class GatedAttention:
    """The layer of ``tensors``, without a window."""

    def __init__(self, builder: LayerBuilder, config: ModelConfig, module: str) -> None:
        self._heads = GatedHeads(builder, config, module)
        self._inner = SelfAttention(
            builder, config, lambda heads: heads, lambda result: result, 0, norm=self._heads.norm
        )
        self._output = builder.row_parallel(f"{module}.o_proj")

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Any, batch: ForwardBatch, wanted: Tensor | None
    ) -> Tensor:
        """As ``AttentionLayer``."""
        heads, gates = self._heads(x)
        result = self._inner(heads, cos, sin, cache, batch, wanted)
        if wanted is not None:
            gates = gates.index_select(0, wanted)
        return self._output(result * torch.sigmoid(gates))


class ApartGates:
    """``output(sigmoid(gate(x)) * inner(x))``. ``inner``: attention whose results are not projected back. ``gate``: a
    module with an output for each of the ``heads``, or for each number of them. ``output``: the module after both."""

    def __init__(self, builder: LayerBuilder, inner: AttentionLayer, heads: int, gate: str, output: str) -> None:
        self.inner, self.heads = inner, heads
        self.gate, self.output = builder.linear(gate), builder.row_parallel(output)
        self.without_program = builder.ops.elementwise.without_program()

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Any, batch: ForwardBatch, wanted: Tensor | None
    ) -> Tensor:
        """As ``AttentionLayer``."""
        result = self.without_program(self.inner(x, cos, sin, cache, batch, wanted))
        gates = torch.sigmoid(self.gate(x if wanted is None else x.index_select(0, wanted)))
        return self.output((result.unflatten(1, (self.heads, -1)) * gates.unflatten(1, (self.heads, -1))).flatten(1))


def apart_gated(builder: LayerBuilder, config: ModelConfig, module: str, window: int, gate: str) -> ApartGates:
    """``gqa.tensors`` with head norms and ``ApartGates``. ``window``: tokens that a query sees, 0 for all. ``gate``:
    their module's name in ``module``."""
    norm = builder.head_norms(
        f"{module}.q_norm",
        f"{module}.k_norm",
        config.heads,
        config.kv_heads,
        config.norm_eps,
        order=gqa.head_order(config),
        offset=config.norm_offset,
    )
    qkv = gqa.projection(builder, config, f"{module}.q_proj", f"{module}.k_proj", f"{module}.v_proj")
    inner = SelfAttention(builder, config, qkv, lambda x: x, window, norm=norm)
    return ApartGates(builder, inner, config.heads, f"{module}.{gate}", f"{module}.o_proj")
