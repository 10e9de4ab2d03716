"""GLM-4 (GLM Team, arXiv 2406.12793), as transformers stores it: Llama's decoder with a fused gate and up, a bias on
queries, keys and values, and a rotation of neighbors in the first half of each head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kernels.contract.caches import CacheGroup
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, pre_norm, vocabulary
from kernels.models.layers.builder import ModelBuilder
from kernels.models.layers.mlp import FeedForward
from kernels.models.layers.pre_norm import PreNormLayer
from kernels.weights.tensors import Role, TensorSpec, by_inputs, by_outputs, linear, norm

__all__ = ["build", "caches", "config", "tensors"]


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    plain = raw.decoder(qkv_bias=raw.flag("attention_bias", True), eps=1.5625e-7, head_dim=128, rotary=0.5)
    return dataclasses.replace(plain, rope_interleaved=True)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    hidden, inner = config.hidden_size, config.intermediate_size
    by_pair = by_outputs(*2 * [(inner, inner)])
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer, gguf = f"model.layers.{index}", f"blk.{index}"
        yield from pre_norm.norm_tensors(config, layer, gguf)
        yield from gqa.tensors(config, f"{layer}.self_attn", f"{gguf}.attn")
        yield from linear(f"{layer}.mlp.gate_up_proj", (2 * inner, hidden), by_pair, f"{gguf}.ffn_up")
        down = f"{layer}.mlp.down_proj"
        yield from linear(down, (hidden, inner), by_inputs(inner, inner), f"{gguf}.ffn_down", role=Role.DOWN)
    yield norm("model.norm", hidden, "output_norm")


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """The caches of the layers."""
    return gqa.caches(config)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config)
    layers = [_layer(config, builder, f"model.layers.{index}", window) for index, window in enumerate(config.windows)]
    return Decoder(builder, config, vocab, layers, builder.norm("model.norm", config.norm_eps))


def _layer(config: ModelConfig, builder: ModelBuilder, name: str, window: int) -> PreNormLayer:
    first = builder.norm(f"{name}.input_layernorm", config.norm_eps)
    attention = gqa.attention(builder, config, f"{name}.self_attn", window)
    second = builder.norm(f"{name}.post_attention_layernorm", config.norm_eps)
    gate_up, down = builder.gated(f"{name}.mlp.gate_up_proj"), builder.into_stream(f"{name}.mlp.down_proj")
    return PreNormLayer(builder, first, attention, second, FeedForward(builder, second, gate_up, down))
