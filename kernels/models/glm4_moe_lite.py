"""GLM-4.7-Flash (Z.ai, https://huggingface.co/zai-org/GLM-4.7-Flash): DeepSeek V3's decoder with other sizes."""

from __future__ import annotations

from kernels.models import deepseek_v3
from kernels.models.config import ConfigReader, ModelConfig

__all__ = ["build", "caches", "config", "tensors"]

tensors, caches, build = deepseek_v3.tensors, deepseek_v3.caches, deepseek_v3.build


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    experts = raw.deepseek_experts(raw.later_layers(1), "sigmoid", pair_sum=True)
    return raw.latent_decoder(experts=experts, eps=1e-5)
