"""Ministral 3 (Mistral AI, https://huggingface.co/mistralai): Mistral's decoder, whose rotation YaRN stretches and
whose queries grow with their positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, sparse
from kernels.models.layers.block import attention
from kernels.models.layers.builder import ModelBuilder
from kernels.models.mistral4 import query_growth
from kernels.weights.tensors import TensorSpec

__all__ = ["build", "caches", "config", "tensors"]

caches = gqa.caches

_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""If config.json says nothing of rotation."""


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    if not (raw.raw.get("rope_parameters") or raw.raw.get("rope_scaling")):
        raw = ConfigReader({**raw.raw, "rope_parameters": _ROPE}, raw.architecture)
    plain = raw.decoder(windows=raw.windows(), eps=1e-5, head_dim=128)
    return dataclasses.replace(plain, query_growth=query_growth(raw))


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    return sparse.tensors(config, attention=gqa.interleaved_tensors)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    return sparse.build(config, builder, attention=attention)
