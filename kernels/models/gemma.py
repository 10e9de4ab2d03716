"""Gemma (Gemma Team, arXiv 2403.08295, section 2): Llama's decoder with GELU's gates, large heads, embeddings times the
root of their size, and norms that are stored less one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kernels.contract.errors import ConfigError
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, pre_norm, vocabulary
from kernels.models.layers.block import Block, Norms, attention, gated_mlp
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.weights.tensors import TensorSpec, norm

__all__ = ["build", "caches", "config", "tensors"]

caches = gqa.caches


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json. Its first files say gelu and mean the approximation by tanh."""
    if raw.flag("use_bidirectional_attention"):
        raise ConfigError("use_bidirectional_attention is for embeddings; use a model that generates text")
    if raw.raw.get("hidden_activation") is None and raw.raw.get("hidden_act") == "gelu":
        raw = ConfigReader({**raw.raw, "hidden_act": "gelu_pytorch_tanh"}, raw.architecture)
    bias = raw.flag("attention_bias")
    plain = raw.decoder(qkv_bias=bias, output_bias=bias, activation="gelu_tanh", head_dim=256, tied=True)
    return dataclasses.replace(
        plain, embedding_scale=plain.hidden_size**0.5, norm_offset=0.0 if raw.flag("whole_norms") else 1.0
    )


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        yield from pre_norm.tensors(config, f"model.layers.{index}", f"blk.{index}")
    yield norm("model.norm", config.hidden_size, "output_norm")


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config)
    layers = [_layer(config, builder, f"model.layers.{index}") for index in range(config.layers)]
    return Decoder(builder, config, vocab, layers, builder.norm("model.norm", config.norm_eps, config.norm_offset))


def _layer(config: ModelConfig, builder: LayerBuilder, name: str) -> Block:
    norms = Norms(
        before_attention=builder.norm(f"{name}.input_layernorm", config.norm_eps, config.norm_offset),
        before_mlp=builder.norm(f"{name}.post_attention_layernorm", config.norm_eps, config.norm_offset),
    )
    result = attention(builder, config, f"{name}.self_attn", 0)
    return Block(builder, config, result, gated_mlp(builder, config, f"{name}.mlp"), norms)
