"""Granite 3's mixtures of experts (IBM, https://github.com/ibm-granite/granite-3.0-language-models): Granite's decoder
and its multipliers, with experts in every layer, which checkpoints hold in one tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kernels.models import granite
from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, sparse
from kernels.models.layers.block import attention
from kernels.models.layers.builder import ModelBuilder
from kernels.models.layers.moe import ExpertNames
from kernels.weights.tensors import TensorSpec

__all__ = ["build", "caches", "config", "tensors"]

_NAMES = ExpertNames(
    "block_sparse_moe",
    "gate_proj",
    "up_proj",
    "down_proj",
    router="router.layer",
    both="block_sparse_moe.input_linear.weight",
    down_of_all="block_sparse_moe.output_linear.weight",
)

caches = gqa.caches


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    count, chosen = raw.expert_counts()
    layers, inner = frozenset(range(raw.layers)), raw.size("intermediate_size")
    experts = ExpertsConfig(layers, count, chosen, inner, normalized=True)
    return dataclasses.replace(granite.config(raw), experts=experts)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    return sparse.tensors(config, _NAMES, gqa.interleaved_tensors)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    return sparse.build(config, builder, _NAMES, attention)
