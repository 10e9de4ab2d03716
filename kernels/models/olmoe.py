"""OLMoE (Muennighoff et al., arXiv 2409.02060): norms over the width of all query and of all key heads, and experts in
every layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, sparse
from kernels.models.layers.block import wide_attention
from kernels.models.layers.builder import ModelBuilder
from kernels.models.layers.moe import QWEN
from kernels.weights.tensors import TensorSpec

__all__ = ["build", "caches", "config", "tensors"]

caches = gqa.caches


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    count, chosen = raw.expert_counts()
    layers, normalized = frozenset(range(raw.layers)), raw.flag("norm_topk_prob")
    bias, inner = raw.flag("attention_bias"), raw.size("intermediate_size")
    experts = ExpertsConfig(layers, count, chosen, inner, normalized)
    plain = raw.decoder(qkv_bias=bias, output_bias=bias, experts=experts, eps=1e-5)
    return dataclasses.replace(plain, qkv_clip=raw.number("clip_qkv", 0.0))


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    return sparse.tensors(config, QWEN, gqa.wide_tensors)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    return sparse.build(config, builder, QWEN, wide_attention)
