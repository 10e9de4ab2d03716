"""Granite 3 (IBM, https://github.com/ibm-granite/granite-3.0-language-models): Llama's decoder with multipliers of
embeddings, attention, residual stream and logits (maximal update parametrization, arXiv 2203.03466).
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
from kernels.weights.tensors import TensorSpec, norm

__all__ = ["build", "caches", "config", "tensors"]


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    bias = raw.flag("attention_bias")
    return dataclasses.replace(
        raw.decoder(qkv_bias=bias, output_bias=bias),
        embedding_scale=raw.number("embedding_multiplier", 1.0),
        attention_scale=raw.number("attention_multiplier", 1.0),
        residual_scale=raw.number("residual_multiplier", 1.0),
        logit_scale=1.0 / raw.number("logits_scaling", 1.0),
    )


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        yield from pre_norm.tensors(config, f"model.layers.{index}", f"blk.{index}", interleaved=True)
    yield norm("model.norm", config.hidden_size, "output_norm")


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
    feed_forward = gated_mlp(builder, config, f"{name}.mlp")
    return Block(builder, config, attention(builder, config, f"{name}.self_attn", window), feed_forward, norms)
