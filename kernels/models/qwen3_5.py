"""Qwen3.5, its language model (https://huggingface.co/Qwen/Qwen3.5-27B), dense and with experts: Qwen3-Next's decoder,
whose delta nets have a projection for each of their inputs.

Text turns all parts of a head by the same position, whatever ``mrope_section`` says.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernels.models import qwen3_next
from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import sparse
from kernels.models.layers.builder import ModelBuilder
from kernels.weights.tensors import TensorSpec

__all__ = ["build", "caches", "config", "tensors"]

caches = qwen3_next.caches


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    inner, experts = raw, None
    if raw.architecture.startswith("Qwen3_5Moe"):
        shared = inner.size("shared_expert_intermediate_size", 512)
        count, chosen = inner.expert_counts()
        width = inner.size("moe_intermediate_size", 512)
        experts = ExpertsConfig(frozenset(range(inner.layers)), count, chosen, width, True, shared)
        inner = ConfigReader({"intermediate_size": shared, **inner.raw}, raw.architecture)
    return qwen3_next.decoder(inner, experts, grouped=False)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    return sparse.mixed_tensors(config, qwen3_next.mixer_tensors, second="post_attention_norm")


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    return sparse.build_mixed(config, builder, qwen3_next.mixer)
