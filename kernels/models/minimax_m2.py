"""MiniMax M2 (https://huggingface.co/MiniMaxAI/MiniMax-M2): norms over the width of all query and of all key heads,
part of each head rotated, and in every layer experts that a sigmoid scores and a correction balances.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, sparse
from kernels.models.layers.block import wide_attention
from kernels.models.layers.builder import ModelBuilder
from kernels.models.mixtral import NAMES
from kernels.weights.tensors import TensorSpec

__all__ = ["build", "caches", "config", "tensors"]

_NAMES = dataclasses.replace(NAMES, correction="e_score_correction_bias")

caches = gqa.caches


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    count, chosen = raw.expert_counts()
    inner, layers = raw.size("intermediate_size"), frozenset(range(raw.layers))
    experts = ExpertsConfig(layers, count, chosen, inner, normalized=True, scores="sigmoid", corrected=True)
    rotary = 1.0
    if raw.raw.get("rotary_dim") is not None:
        rotary = raw.size("rotary_dim") / raw.size("head_dim", 128)
    return raw.decoder(experts=experts, head_dim=128, rotary=rotary, theta=5000000.0)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    return sparse.tensors(config, _NAMES, gqa.wide_tensors)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    return sparse.build(config, builder, _NAMES, wide_attention)
