"""StarCoder 2 (Lozhkov et al., arXiv 2402.19173): layer norms, a bias on every projection, feed-forward layers of GELU
without a gate, and a sliding window in every layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kernels.contract.caches import CacheGroup
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, vocabulary
from kernels.models.layers.block import Block, Norms, attention, plain_mlp
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.weights.tensors import Role, TensorSpec, biased_norm, by_inputs, by_outputs, linear

__all__ = ["build", "caches", "config", "tensors"]


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    bias = raw.flag("use_bias", True)
    plain = raw.decoder(
        qkv_bias=bias,
        output_bias=bias,
        windows=raw.windows(),
        activation="gelu_tanh",
        norm_eps="norm_epsilon",
        eps=1e-5,
        tied=True,
    )
    return dataclasses.replace(plain, mlp_bias=bias)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer, gguf = f"model.layers.{index}", f"blk.{index}"
        yield from biased_norm(f"{layer}.input_layernorm", hidden, f"{gguf}.attn_norm")
        yield from gqa.tensors(config, f"{layer}.self_attn", f"{gguf}.attn")
        yield from biased_norm(f"{layer}.post_attention_layernorm", hidden, f"{gguf}.ffn_norm")
        up, down = f"{layer}.mlp.c_fc", f"{layer}.mlp.c_proj"
        yield from linear(up, (inner, hidden), by_outputs((inner, inner)), f"{gguf}.ffn_up", bias=bias)
        yield from linear(down, (hidden, inner), by_inputs(inner, inner), f"{gguf}.ffn_down", bias=bias, role=Role.DOWN)
    yield from biased_norm("model.norm", hidden, "output_norm")


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """The caches of the layers."""
    return gqa.caches(config)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config)
    layers = [_layer(config, builder, f"model.layers.{index}", window) for index, window in enumerate(config.windows)]
    return Decoder(builder, config, vocab, layers, builder.layer_norm("model.norm", eps=config.norm_eps))


def _layer(config: ModelConfig, builder: LayerBuilder, name: str, window: int) -> Block:
    norms = Norms(
        before_attention=builder.layer_norm(f"{name}.input_layernorm", eps=config.norm_eps),
        before_mlp=builder.layer_norm(f"{name}.post_attention_layernorm", eps=config.norm_eps),
    )
    feed_forward = plain_mlp(builder, config, f"{name}.mlp.c_fc", f"{name}.mlp.c_proj")
    return Block(builder, config, attention(builder, config, f"{name}.self_attn", window), feed_forward, norms)
