"""XVERSE (https://github.com/xverse-ai/XVERSE-MoE-A36B): Llama's decoder. In its mixtures, layers have experts beside
one that all tokens take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, sparse
from kernels.models.layers.builder import ModelBuilder
from kernels.models.layers.moe import DEEPSEEK
from kernels.weights.tensors import TensorSpec

__all__ = ["build", "caches", "config", "tensors"]

_NAMES = dataclasses.replace(DEEPSEEK, router="router", correction="")

caches = gqa.caches


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    if raw.raw.get("num_experts") is None:
        return raw.decoder()
    chosen = {"num_experts_per_tok": raw.raw.get("moe_top_k", raw.raw.get("num_experts_per_tok"))}
    count, taken = ConfigReader({**raw.raw, **chosen}, raw.architecture).expert_counts()
    inner, alike = raw.size("intermediate_size"), raw.raw.get("num_shared_experts")
    experts = ExpertsConfig(
        frozenset(range(raw.layers)),
        count,
        taken,
        inner,
        normalized=raw.flag("norm_topk_prob"),
        shared=0 if alike is None else inner * raw.size("num_shared_experts"),
        weighted=False,
    )
    return raw.decoder(experts=experts)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    return sparse.tensors(config, _NAMES, gqa.interleaved_tensors)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    return sparse.build(config, builder, _NAMES)
