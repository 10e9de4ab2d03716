"""Arcee's AFM (https://www.arcee.ai/blog/deep-dive-afm-4-5b-the-first-arcee-foundational-model): Llama's decoder with
feed-forward layers of squared ReLU, without a gate (So et al., arXiv 2109.08668).
"""

from __future__ import annotations

from collections.abc import Iterator

from kernels.contract.caches import CacheGroup
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, pre_norm, vocabulary
from kernels.models.layers.block import Block, Norms, attention, plain_mlp
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.weights.tensors import Role, TensorSpec, by_inputs, by_outputs, linear, norm

__all__ = ["build", "caches", "config", "tensors"]


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    bias = raw.flag("attention_bias")
    return raw.decoder(qkv_bias=bias, output_bias=bias, activation="relu2", eps=1e-5)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer, gguf = f"model.layers.{index}", f"blk.{index}"
        yield from pre_norm.norm_tensors(config, layer, gguf)
        yield from gqa.tensors(config, f"{layer}.self_attn", f"{gguf}.attn", interleaved=True)
        up, down = f"{layer}.mlp.up_proj", f"{layer}.mlp.down_proj"
        yield from linear(up, (inner, hidden), by_outputs((inner, inner)), f"{gguf}.ffn_up", bias=bias)
        yield from linear(down, (hidden, inner), by_inputs(inner, inner), f"{gguf}.ffn_down", bias=bias, role=Role.DOWN)
    yield norm("model.norm", hidden, "output_norm")


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """The caches of the layers."""
    return gqa.caches(config)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config)
    layers = [_layer(config, builder, f"model.layers.{index}", window) for index, window in enumerate(config.windows)]
    return Decoder(builder, config, vocab, layers, builder.norm("model.norm", config.norm_eps))


def _layer(config: ModelConfig, builder: LayerBuilder, name: str, window: int) -> Block:
    norms = Norms(
        before_attention=builder.norm(f"{name}.input_layernorm", config.norm_eps),
        before_mlp=builder.norm(f"{name}.post_attention_layernorm", config.norm_eps),
    )
    feed_forward = plain_mlp(builder, config, f"{name}.mlp.up_proj", f"{name}.mlp.down_proj")
    return Block(builder, config, attention(builder, config, f"{name}.self_attn", window), feed_forward, norms)
