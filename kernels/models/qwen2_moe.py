"""Qwen1.5-MoE and Qwen2-MoE (https://huggingface.co/Qwen/Qwen1.5-MoE-A2.7B): Qwen2's decoder with layers of experts,
of which one is taken by all tokens, weighted by the sigmoid of a logit of its own (``shared_expert_gate``).
"""

from __future__ import annotations

from collections.abc import Iterator

from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, sparse
from kernels.models.layers.builder import ModelBuilder
from kernels.weights.tensors import TensorSpec

__all__ = ["build", "caches", "config", "tensors"]

caches = gqa.caches


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    windows, sparse = raw.switched_windows(even=True), raw.sparse_layers()
    count, chosen = raw.expert_counts()
    shared, normalized = raw.size("shared_expert_intermediate_size"), raw.flag("norm_topk_prob")
    experts = ExpertsConfig(sparse, count, chosen, raw.size("moe_intermediate_size"), normalized, shared)
    bias = raw.flag("qkv_bias", True) or raw.flag("attention_bias")
    return raw.decoder(qkv_bias=bias, windows=windows, experts=experts)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    return sparse.tensors(config)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    return sparse.build(config, builder)
