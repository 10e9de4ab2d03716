"""GLM-4-0414 (https://github.com/zai-org/GLM-4): GLM-4's decoder with more norms, after attention and after the
feed-forward layer.

    h = h + norm(attention(norm(h)));  h = h + norm(mlp(norm(h)))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kernels.contract.caches import CacheGroup
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, pre_norm, vocabulary
from kernels.models.layers.block import Block, Norms, attention, gated_mlp
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
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
        yield norm(f"{layer}.post_self_attn_layernorm", hidden, f"{gguf}.post_attention_norm")
        yield norm(f"{layer}.post_mlp_layernorm", hidden, f"{gguf}.post_ffw_norm")
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
    names = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    norms = Norms(*(builder.norm(f"{name}.{norm}", config.norm_eps) for norm in names))
    feed_forward = gated_mlp(builder, config, f"{name}.mlp", "gate_up_proj")
    return Block(builder, config, attention(builder, config, f"{name}.self_attn", window), feed_forward, norms)
