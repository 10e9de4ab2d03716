"""InternLM 2 (Cai et al., arXiv 2403.17297): Llama's decoder under names of its own. ``wqkv`` holds for each key head
its queries, the key and the value. Its reward model has the head ``v_head`` (section 4.2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kernels.contract.caches import CacheGroup
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, vocabulary
from kernels.models.layers.builder import ModelBuilder
from kernels.models.layers.gqa import Attention, Heads
from kernels.models.layers.mlp import FeedForward
from kernels.models.layers.pre_norm import PreNormLayer
from kernels.weights.tensors import Role, TensorSpec, by_inputs, by_outputs, linear, norm

__all__ = ["build", "caches", "config", "grouped_order", "tensors"]


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    bias = raw.flag("bias")
    return dataclasses.replace(raw.decoder(qkv_bias=bias, output_bias=bias), reward_head="v_head")


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    hidden, inner, kv_heads = config.hidden_size, config.intermediate_size, config.kv_heads
    queries, rows = config.heads * config.head_dim, (config.heads + 2 * kv_heads) * config.head_dim
    by_group, bias = by_outputs((rows, kv_heads)), config.qkv_bias
    yield from vocabulary.tensors(config, "model.tok_embeddings", "output")
    for index in range(config.layers):
        layer = f"model.layers.{index}"
        yield norm(f"{layer}.attention_norm", hidden)
        yield from linear(f"{layer}.attention.wqkv", (rows, hidden), by_group, bias=bias)
        yield from linear(f"{layer}.attention.wo", (hidden, queries), by_inputs(queries, config.heads), bias=bias)
        yield norm(f"{layer}.ffn_norm", hidden)
        for name in ("w1", "w3"):
            yield from linear(f"{layer}.feed_forward.{name}", (inner, hidden), by_outputs((inner, inner)))
        yield from linear(f"{layer}.feed_forward.w2", (hidden, inner), by_inputs(inner, inner), role=Role.DOWN)
    yield norm("model.norm", hidden)


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """The caches of the layers."""
    return gqa.caches(config)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config, "model.tok_embeddings", "output")
    layers = [_layer(config, builder, f"model.layers.{index}", window) for index, window in enumerate(config.windows)]
    return Decoder(builder, config, vocab, layers, builder.norm("model.norm", config.norm_eps))


def _layer(config: ModelConfig, builder: ModelBuilder, name: str, window: int) -> PreNormLayer:
    attention, feed_forward = f"{name}.attention", f"{name}.feed_forward"
    heads = Heads(config.heads, config.kv_heads, config.head_dim)
    qkv = builder.ordered(grouped_order(config), f"{attention}.wqkv")
    result = Attention(builder, heads, qkv, builder.into_stream(f"{attention}.wo"), window)
    first, second = (builder.norm(f"{name}.{norm}", config.norm_eps) for norm in ("attention_norm", "ffn_norm"))
    gate_up, down = builder.gated(f"{feed_forward}.w1", f"{feed_forward}.w3"), builder.into_stream(f"{feed_forward}.w2")
    return PreNormLayer(builder, first, result, second, FeedForward(builder, second, gate_up, down))


def grouped_order(config: ModelConfig) -> list[int]:
    """Where the outputs of a projection by groups of heads are in the order of queries, keys, values."""
    group = config.heads // config.kv_heads
    queries = [head // group * (group + 2) + head % group for head in range(config.heads)]
    others = [head * (group + 2) + group + part for part in (0, 1) for head in range(config.kv_heads)]
    dim = config.head_dim
    return [head * dim + number for head in (*queries, *others) for number in range(dim)]
