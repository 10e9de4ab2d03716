"""Seed-OSS (https://github.com/ByteDance-Seed/seed-oss): Llama's decoder with a bias on queries, keys and values."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.contract.caches import CacheGroup
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, pre_norm, vocabulary
from kernels.models.layers.builder import ModelBuilder
from kernels.weights.tensors import TensorSpec, norm

__all__ = ["build", "caches", "config", "tensors"]


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    return raw.decoder(
        qkv_bias=raw.flag("attention_bias", True), output_bias=raw.flag("attention_out_bias"), head_dim=128
    )


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        yield from pre_norm.tensors(config, f"model.layers.{index}", f"blk.{index}", second="post_attention_norm")
    yield norm("model.norm", config.hidden_size, "output_norm")


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """The caches of the layers."""
    return gqa.caches(config)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config)
    layers = [
        pre_norm.layer(builder, config, f"model.layers.{index}", window) for index, window in enumerate(config.windows)
    ]
    return Decoder(builder, config, vocab, layers, builder.norm("model.norm", config.norm_eps))
