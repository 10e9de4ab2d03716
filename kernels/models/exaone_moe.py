"""K-EXAONE (LG AI Research, arXiv 2601.01739): layers with a window rotate heads, those with full attention have no
positions; norms of query and key heads; DeepSeek V3's experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kernels.models import exaone4
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, sparse
from kernels.models.layers.builder import ModelBuilder
from kernels.models.layers.moe import DEEPSEEK
from kernels.weights.tensors import TensorSpec

__all__ = ["build", "caches", "config", "tensors"]

caches = gqa.caches
_NAMES = dataclasses.replace(DEEPSEEK, correction="e_score_correction_bias")


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    alike = raw.raw.get("num_shared_experts", 1)
    own = {"n_shared_experts": alike, "norm_topk_prob": raw.flag("norm_topk_prob", True)}
    scale = raw.number("routed_scaling_factor", 2.5)
    given = ConfigReader({**raw.raw, **own, "routed_scaling_factor": scale}, raw.architecture)
    experts = given.deepseek_experts(raw.later_layers(1), "sigmoid", pair_sum=True)
    return dataclasses.replace(exaone4.config(raw), experts=experts)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    return sparse.tensors(config, _NAMES)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    return sparse.build(config, builder, _NAMES)
