"""DeepSeek V2 and V2-Lite (DeepSeek-AI, arXiv 2405.04434): DeepSeek V3's decoder, whose experts a softmax scores; a
group of them is as good as its best.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kernels.models import deepseek_v3
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers.builder import ModelBuilder
from kernels.models.layers.moe import DEEPSEEK
from kernels.weights.tensors import TensorSpec

__all__ = ["build", "caches", "config", "tensors"]

NAMES = dataclasses.replace(DEEPSEEK, correction="")

caches = deepseek_v3.caches


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    experts = raw.deepseek_experts(raw.later_layers(), "softmax", pair_sum=False)
    if raw.raw.get("topk_method", "greedy") == "greedy":
        experts = dataclasses.replace(experts, groups=1, top_groups=1)
    return raw.latent_decoder(experts=experts)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    return deepseek_v3.tensors(config, NAMES)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    return deepseek_v3.build(config, builder, NAMES)
