"""Phi-3.5-MoE (Abdin et al., arXiv 2404.14219): layer norms with biases, and experts that a sparse mixer chooses
(Liu et al., arXiv 2409.12136).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from kernels.contract.errors import ConfigError
from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, sparse
from kernels.models.layers.block import attention
from kernels.models.layers.builder import ModelBuilder
from kernels.models.mixtral import NAMES
from kernels.weights.tensors import TensorSpec

__all__ = ["build", "caches", "config", "tensors"]

_CHOSEN = 2  # experts that the mixer chooses, whatever config.json says

caches = gqa.caches


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json, whose ``rms_norm_eps`` is that of layer norms."""
    count, _ = raw.expert_counts()
    if count < _CHOSEN:
        raise ConfigError(f"config.json: num_local_experts {count} is less than the {_CHOSEN} that a token takes")
    jitter = 0.0 if raw.raw.get("router_jitter_noise") == 0 else raw.number("router_jitter_noise", 0.01)
    layers = frozenset(range(raw.layers))
    inner, bias = raw.size("intermediate_size"), raw.flag("attention_bias")
    experts = ExpertsConfig(layers, count, _CHOSEN, inner, normalized=False, scores="mixer", jitter=jitter)
    plain = _with_scales(raw).decoder(
        qkv_bias=bias, output_bias=bias, windows=raw.windows(), experts=experts, eps=1e-5, theta=1000000.0
    )
    return dataclasses.replace(plain, layer_norms=True, norm_bias=True, head_bias=raw.flag("lm_head_bias"))


def _with_scales(raw: ConfigReader) -> ConfigReader:
    """LongRoPE's factor on cosines and sines is ``long_mscale``: a model is opened for long contexts."""
    own: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        part = raw.raw.get(key)
        if isinstance(part, dict) and part.get("long_mscale") is not None:
            if part.get("short_mscale", part["long_mscale"]) != part["long_mscale"]:
                raise ConfigError(
                    f"config.json: {key} has another short_mscale than long_mscale, which is not supported"
                )
            own[key] = {**part, "attention_factor": part["long_mscale"]}
    return ConfigReader({**raw.raw, **own}, raw.architecture)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    return sparse.tensors(config, NAMES)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    return sparse.build(config, builder, NAMES, attention)
