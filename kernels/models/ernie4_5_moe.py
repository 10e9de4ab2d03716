"""ERNIE 4.5's mixtures of experts (Baidu, https://github.com/PaddlePaddle/ERNIE): neighbors of a head rotate against
one another, and a correction balances experts that a softmax scores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kernels.contract.errors import ConfigError
from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, sparse
from kernels.models.layers.builder import ModelBuilder
from kernels.models.layers.moe import DEEPSEEK
from kernels.weights.tensors import TensorSpec

__all__ = ["build", "caches", "config", "tensors"]

_NAMES = dataclasses.replace(DEEPSEEK, correction="moe_statics.e_score_correction_bias", boxed=True)

caches = gqa.caches


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    own = {"num_experts": raw.raw.get("moe_num_experts", 64), "num_experts_per_tok": raw.raw.get("moe_k", 6)}
    count, chosen = ConfigReader({**raw.raw, **own}, raw.architecture).expert_counts()
    inner = raw.size("moe_intermediate_size")
    bias = raw.flag("use_bias")
    alike = raw.raw.get("moe_num_shared_experts", 2)
    if type(alike) is not int or alike < 0:
        raise ConfigError(f"config.json: moe_num_shared_experts must be a whole number, and is {alike!r}")
    experts = ExpertsConfig(
        _layers(raw),
        count,
        chosen,
        inner,
        normalized=True,
        shared=inner * alike,
        weighted=False,
        corrected=True,
        shared_bias=bias,
    )
    plain = raw.decoder(qkv_bias=bias, output_bias=bias, experts=experts, eps=1e-5, theta=500000.0, tied=True)
    return dataclasses.replace(plain, rope_interleaved=True, mlp_bias=bias, head_bias=bias)


def _layers(raw: ConfigReader) -> frozenset[int]:
    """From ``moe_layer_start_index`` to ``moe_layer_end_index``, every ``moe_layer_interval``-th."""
    first, last = raw.raw.get("moe_layer_start_index", 1), raw.raw.get("moe_layer_end_index", -1)
    if type(first) is not int or type(last) is not int:
        raise ConfigError("config.json: moe_layer_start_index and moe_layer_end_index must be whole numbers")
    every, end = raw.size("moe_layer_interval", 1), raw.layers - 1 if last == -1 else last
    return frozenset(layer for layer in range(raw.layers) if first <= layer <= end and (layer + 1) % every == 0)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    return sparse.tensors(config, _NAMES)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    return sparse.build(config, builder, _NAMES)
