"""GLM-5 (Z.ai, https://huggingface.co/zai-org/GLM-5): DeepSeek V3.2's decoder with other sizes, where some layers
may take the tokens that a layer before them chose (arXiv 2603.12201).
"""

from __future__ import annotations

from kernels.models import deepseek_v32
from kernels.models.config import ConfigReader, ModelConfig

__all__ = ["build", "caches", "config", "tensors"]

tensors, caches, build = deepseek_v32.tensors, deepseek_v32.caches, deepseek_v32.build


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    experts = raw.deepseek_experts(raw.later_layers(3), "sigmoid", pair_sum=True)
    return raw.indexed_decoder(experts=experts, eps=1e-5, index_interleaved=True)
