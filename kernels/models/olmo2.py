"""OLMo 2 (OLMo Team, arXiv 2501.00656, section 2.1): norms come after attention and feed-forward layers.

    h = embed(ids)
    for each layer:  h = h + norm(attention(h));  h = h + norm(mlp(h))
    logits = head(norm(h))

Queries and keys are normed before they are rotated, each over the width of all heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernels.contract.caches import CacheGroup
from kernels.core.batch import ForwardBatch
from kernels.core.operators import Linear, Norm, PendingResidual
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, mlp, vocabulary
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.weights.tensors import TensorSpec, by_outputs, norm

__all__ = ["build", "caches", "config", "tensors"]


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    bias = raw.flag("attention_bias")
    return raw.decoder(qkv_bias=bias, output_bias=bias)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    hidden, heads, kv_heads = config.hidden_size, config.heads, config.kv_heads
    queries, keys = heads * config.head_dim, kv_heads * config.head_dim
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer, gguf = f"model.layers.{index}", f"blk.{index}"
        yield from gqa.tensors(config, f"{layer}.self_attn", f"{gguf}.attn")
        yield norm(f"{layer}.self_attn.q_norm", queries, f"{gguf}.attn_q_norm", by_outputs((queries, heads)))
        yield norm(f"{layer}.self_attn.k_norm", keys, f"{gguf}.attn_k_norm", by_outputs((keys, kv_heads)))
        yield norm(f"{layer}.post_attention_layernorm", hidden, f"{gguf}.post_attention_norm")
        yield from mlp.tensors(config, f"{layer}.mlp", f"{gguf}.ffn")
        yield norm(f"{layer}.post_feedforward_layernorm", hidden, f"{gguf}.post_ffw_norm")
    yield norm("model.norm", hidden, "output_norm")


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """What the layers keep of the tokens before."""
    return gqa.caches(config)


def build(config: ModelConfig, make: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    ends = vocabulary.vocabulary(make, config)
    layers = [_Layer(config, make, f"model.layers.{index}", window) for index, window in enumerate(config.windows)]
    return Decoder(make, config, ends, layers, make.norm("model.norm", config.norm_eps))


class _Layer:
    first_norm: Norm | None = None  # the residual stream is read as it is

    def __init__(self, config: ModelConfig, make: LayerBuilder, name: str, window: int) -> None:
        attention, self.rows = f"{name}.self_attn", make.rows
        self.attention, self.elementwise = make.ops.attention, make.ops.elementwise
        self.heads, self.total, self.dim = config.heads, config.heads + 2 * config.kv_heads, config.head_dim
        self.window, self.scale = window, config.head_dim**-0.5
        self.projections: list[Linear] = [make.linear(f"{attention}.{part}_proj") for part in "qkv"]
        self.norms = [_wide_norm(make, f"{attention}.{part}_norm", config.norm_eps) for part in "qk"]
        self.output = make.row_parallel(f"{attention}.o_proj")
        self.attention_norm = make.norm(f"{name}.post_attention_layernorm", config.norm_eps)
        self.gate_up = make.gated(f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj")
        self.down = make.row_parallel(f"{name}.mlp.down_proj")
        self.feed_forward_norm = make.norm(f"{name}.post_feedforward_layernorm", config.norm_eps)

    def set_next_norm(self, norm: Norm) -> None:
        """Nothing: this layer's results are normed before they are added."""

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
        residual = self.elementwise.add_pending(x, residual)
        queries, keys, values = (projection(residual) for projection in self.projections)
        qkv = self.elementwise.empty_rows(len(residual), self.total * self.dim, residual.dtype)
        first = self.heads * self.dim
        last = first + keys.shape[1]
        self.elementwise.add_rows(self.norms[0](queries), None, qkv[:, :first])
        self.elementwise.add_rows(self.norms[1](keys), None, qkv[:, first:last])
        self.elementwise.add_rows(values, None, qkv[:, last:])
        heads = qkv.view(-1, self.total, self.dim)
        placed = self.attention.place_heads(heads, self.heads, None, cos, sin, cache, batch.cache_index)
        found = self.attention.attend(placed, cache, batch.plans[self.window], self.scale)
        if wanted is not None:
            found, residual = found.index_select(0, wanted), residual.index_select(0, wanted)
            if self.rows is not None:
                self.rows.select(wanted)
        residual = self.elementwise.add_pending(self.attention_norm(self.output(found)), residual)
        return self.feed_forward_norm(self.down(self.gate_up(residual))), residual


def _wide_norm(make: LayerBuilder, module: str, eps: float) -> Norm | Linear:
    """A norm over the width of all heads, of which each rank has some."""
    if make.mesh.size == 1:
        return make.norm(module, eps)
    weight, mesh = make.source.take([f"{module}.weight"]), make.mesh

    def normed(x: Tensor) -> Tensor:
        wide = x.float()
        mean = mesh.all_reduce(wide.pow(2).mean(-1, keepdim=True)) / mesh.size
        return (weight * wide * torch.rsqrt(mean + eps)).to(x.dtype)

    return normed
