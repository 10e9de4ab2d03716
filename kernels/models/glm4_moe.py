"""GLM-4.5, 4.6 and 4.7 (Z.ai, arXiv 2508.06471): grouped-query attention, half of each head rotated, and DeepSeek V3's
experts.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, sparse
from kernels.models.layers.builder import ModelBuilder
from kernels.models.layers.moe import DEEPSEEK
from kernels.weights.tensors import TensorSpec

__all__ = ["build", "caches", "config", "tensors"]

caches = gqa.caches


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    experts = raw.deepseek_experts(raw.later_layers(1), "sigmoid", pair_sum=True)
    bias, normed = raw.flag("attention_bias"), raw.flag("use_qk_norm")
    return raw.decoder(qkv_bias=bias, qk_norm=normed, experts=experts, eps=1e-5, rotary=0.5)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    return sparse.tensors(config, DEEPSEEK, second="post_attention_norm")


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    return sparse.build(config, builder, DEEPSEEK)
