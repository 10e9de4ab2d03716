"""DeepSeek V3, R1 and V3.1 (DeepSeek-AI, arXiv 2412.19437), and Kimi K2 (arXiv 2507.20534): latent attention, and
experts that a sigmoid scores and a correction balances, in groups.

Checkpoints hold further layers for the tokens after the next, after the first ``num_hidden_layers``.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import mla, sparse
from kernels.models.layers.builder import ModelBuilder
from kernels.models.layers.moe import DEEPSEEK, ExpertNames
from kernels.weights.tensors import TensorSpec

__all__ = ["build", "caches", "config", "tensors"]

caches = mla.caches


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    experts = raw.deepseek_experts(raw.later_layers(3), "sigmoid", pair_sum=True)
    return raw.latent_decoder(experts=experts)


def tensors(config: ModelConfig, names: ExpertNames = DEEPSEEK) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    return sparse.tensors(config, names, mla.tensors)


def build(config: ModelConfig, builder: ModelBuilder, names: ExpertNames = DEEPSEEK) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    return sparse.build(config, builder, names, mla.attention)
