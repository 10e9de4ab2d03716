"""Bamba (IBM, Princeton, UIUC, https://github.com/foundation-model-stack/bamba): most layers are Mamba 2, the others
attention that rotates half of each head; all have a gated feed-forward layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kernels.contract.caches import CacheGroup
from kernels.contract.errors import ConfigError
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, mamba, mlp, recurrent, vocabulary
from kernels.models.layers.block import AttentionLayer, Block, Norms, attention, gated_mlp
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.models.layers.mamba import Mamba
from kernels.weights.tensors import TensorSpec, norm

__all__ = ["build", "caches", "config", "tensors"]


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    bias, chosen = raw.flag("attention_bias"), raw.raw.get("attn_layer_indices") or []
    if not isinstance(chosen, list) or not all(type(layer) is int for layer in chosen):
        raise ConfigError(f"config.json: attn_layer_indices must be a list of layers, and is {chosen!r}")
    plain = raw.decoder(qkv_bias=bias, output_bias=bias, eps=1e-5, rotary=0.5)
    return dataclasses.replace(
        plain,
        recurrence=mamba.read(raw, raw.size("mamba_expand", 2) * plain.hidden_size),
        recurrent=frozenset(layer for layer in range(plain.layers) if layer not in chosen),
    )


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer = f"model.layers.{index}"
        for name in ("input_layernorm", "pre_ff_layernorm"):
            yield norm(f"{layer}.{name}", config.hidden_size)
        if index in config.recurrent:
            yield from mamba.tensors(config, f"{layer}.mamba", "")
        else:
            yield from gqa.tensors(config, f"{layer}.self_attn", "")
        yield from mlp.tensors(config, f"{layer}.feed_forward", "")
    yield norm("model.final_layernorm", config.hidden_size)


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """Keys and values of the layers with attention, states of the others."""
    return recurrent.with_attention(config, gqa.caches(config))


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config)
    layers = [_layer(config, builder, index) for index in range(config.layers)]
    return Decoder(builder, config, vocab, layers, builder.norm("model.final_layernorm", config.norm_eps))


def _layer(config: ModelConfig, builder: LayerBuilder, index: int) -> Block:
    name = f"model.layers.{index}"
    norms = Norms(
        before_attention=builder.norm(f"{name}.input_layernorm", config.norm_eps),
        before_mlp=builder.norm(f"{name}.pre_ff_layernorm", config.norm_eps),
    )
    mixer: AttentionLayer
    if index in config.recurrent:
        mixer = Mamba(builder, config, f"{name}.mamba")
    else:
        mixer = attention(builder, config, f"{name}.self_attn", 0)
    return Block(builder, config, mixer, gated_mlp(builder, config, f"{name}.feed_forward"), norms)
