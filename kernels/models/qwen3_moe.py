"""Qwen3-MoE (Yang et al., arXiv 2505.09388): Qwen3's decoder, most of whose feed-forward layers are experts.

Layers that ``mlp_only_layers`` names, and those that ``decoder_sparse_step`` passes over, have one plain layer.
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
    """The sizes in config.json; Qwen3-VL's says nothing of the sum of weights, which is one."""
    normalized = raw.flag("norm_topk_prob", raw.raw.get("model_type") == "qwen3_vl_moe_text")
    bias, windows, sparse = raw.flag("attention_bias"), raw.switched_windows(), raw.sparse_layers()
    count, chosen = raw.expert_counts()
    experts = ExpertsConfig(sparse, count, chosen, raw.size("moe_intermediate_size"), normalized)
    return raw.decoder(qkv_bias=bias, output_bias=bias, qk_norm=True, windows=windows, experts=experts)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    return sparse.tensors(config)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    return sparse.build(config, builder)
