"""OLMo (Groeneveld et al., arXiv 2402.00838): Llama's decoder with layer norms that have neither weights nor biases;
queries, keys and values may be clamped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from kernels.core.operators import Norm
from kernels.devices.elementwise import LayerNorm
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, mlp, vocabulary
from kernels.models.layers.block import Block, Norms, attention, gated_mlp
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.weights.tensors import TensorSpec

__all__ = ["build", "caches", "config", "tensors"]

_EPS = 1e-5  # which config.json does not have

caches = gqa.caches


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    bias = raw.flag("attention_bias")
    plain = raw.decoder(qkv_bias=bias, output_bias=bias, norm_eps="layer_norm_eps", eps=_EPS)
    return dataclasses.replace(plain, qkv_clip=raw.number("clip_qkv", 0.0))


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        yield from gqa.interleaved_tensors(config, f"model.layers.{index}.self_attn", f"blk.{index}.attn")
        yield from mlp.tensors(config, f"model.layers.{index}.mlp", f"blk.{index}.ffn")


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config)
    layers = [_layer(config, builder, f"model.layers.{index}") for index in range(config.layers)]
    return Decoder(builder, config, vocab, layers, _norm(config, builder))


def _layer(config: ModelConfig, builder: LayerBuilder, name: str) -> Block:
    norms = Norms(before_attention=_norm(config, builder), before_mlp=_norm(config, builder))
    result = attention(builder, config, f"{name}.self_attn", 0)
    return Block(builder, config, result, gated_mlp(builder, config, f"{name}.mlp"), norms)


def _norm(config: ModelConfig, builder: LayerBuilder) -> Norm:
    ones = torch.ones(config.hidden_size, device=builder.ops.torch_device)
    return LayerNorm(builder.ops.elementwise, ones, None, config.norm_eps)
