"""Mistral 4 (Mistral AI, https://huggingface.co/mistralai): DeepSeek V3's decoder, whose experts a softmax scores;
queries grow with their positions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kernels.models import deepseek_v2
from kernels.models.config import ConfigReader, ModelConfig, QueryGrowth

__all__ = ["build", "caches", "config", "query_growth", "tensors"]

tensors, caches, build = deepseek_v2.tensors, deepseek_v2.caches, deepseek_v2.build

_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""If config.json says nothing of rotation."""


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    if not (raw.raw.get("rope_parameters") or raw.raw.get("rope_scaling")):
        raw = ConfigReader({**raw.raw, "rope_parameters": _ROPE}, raw.architecture)
    experts = raw.deepseek_experts(raw.later_layers(), "softmax", pair_sum=True)
    plain = raw.latent_decoder(experts=experts)
    return dataclasses.replace(plain, query_growth=query_growth(raw))


def query_growth(raw: ConfigReader) -> QueryGrowth | None:
    """By ``llama_4_scaling_beta`` of the rotation; None: config.json has none."""
    rope = raw.raw.get("rope_parameters") or raw.raw.get("rope_scaling")
    given = ConfigReader(rope if isinstance(rope, dict) else {}, raw.architecture)
    if given.raw.get("llama_4_scaling_beta") is None:
        return None
    return QueryGrowth(given.number("llama_4_scaling_beta", 0.1), given.size("original_max_position_embeddings"))
