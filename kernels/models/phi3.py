"""Phi-3 (Abdin et al., arXiv 2404.14219), Phi-3.5 and Phi-4 (arXiv 2412.08905): Llama's decoder with fused projections.

``qkv_proj`` holds queries, keys and values, ``gate_up_proj`` a feed-forward layer's gate and up. Long contexts are
reached by LongRoPE (Ding et al., arXiv 2402.13753); some checkpoints have a sliding window in every layer.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernels.contract.caches import CacheGroup
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, pre_norm, vocabulary
from kernels.models.layers.builder import ModelBuilder
from kernels.models.layers.gqa import Attention, Heads
from kernels.models.layers.mlp import FeedForward
from kernels.models.layers.pre_norm import PreNormLayer
from kernels.weights.tensors import Role, TensorSpec, by_inputs, by_outputs, linear, norm

__all__ = ["build", "caches", "config", "tensors"]


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    return raw.decoder(windows=raw.windows(), eps=1e-5)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    hidden, inner, heads, kv_heads = config.hidden_size, config.intermediate_size, config.heads, config.kv_heads
    queries, keys = heads * config.head_dim, kv_heads * config.head_dim
    by_head, by_pair = (
        by_outputs((queries, heads), (keys, kv_heads), (keys, kv_heads)),
        by_outputs(*2 * [(inner, inner)]),
    )
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer, gguf = f"model.layers.{index}", f"blk.{index}"
        yield from pre_norm.norm_tensors(config, layer, gguf)
        attention, feed_forward, down = f"{layer}.self_attn", f"{layer}.mlp", by_inputs(inner, inner)
        yield from linear(f"{attention}.qkv_proj", (queries + 2 * keys, hidden), by_head, f"{gguf}.attn_qkv")
        yield from linear(f"{attention}.o_proj", (hidden, queries), by_inputs(queries, heads), f"{gguf}.attn_output")
        yield from linear(f"{feed_forward}.gate_up_proj", (2 * inner, hidden), by_pair, f"{gguf}.ffn_up")
        yield from linear(f"{feed_forward}.down_proj", (hidden, inner), down, f"{gguf}.ffn_down", role=Role.DOWN)
    yield norm("model.norm", hidden, "output_norm")


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """The caches of the layers."""
    return gqa.caches(config)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config)
    layers = [_layer(config, builder, index) for index in range(config.layers)]
    return Decoder(builder, config, vocab, layers, builder.norm("model.norm", config.norm_eps))


def _layer(config: ModelConfig, builder: ModelBuilder, index: int) -> PreNormLayer:
    name = f"model.layers.{index}"
    first = builder.norm(f"{name}.input_layernorm", config.norm_eps)
    heads = Heads(config.heads, config.kv_heads, config.head_dim)
    qkv, output = (
        gqa.projection(builder, config, f"{name}.self_attn.qkv_proj"),
        builder.into_stream(f"{name}.self_attn.o_proj"),
    )
    attention = Attention(builder, heads, qkv, output, config.windows[index])
    second = builder.norm(f"{name}.post_attention_layernorm", config.norm_eps)
    gate_up, down = builder.gated(f"{name}.mlp.gate_up_proj"), builder.into_stream(f"{name}.mlp.down_proj")
    return PreNormLayer(builder, first, attention, second, FeedForward(builder, second, gate_up, down))
