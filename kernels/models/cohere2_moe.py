"""Cohere 2's mixtures of experts (Cohere, https://huggingface.co/CohereLabs): Command R7B's decoder, whose first layers
may be dense and whose others have experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kernels.contract.errors import ConfigError
from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, sparse
from kernels.models.layers.block import attention
from kernels.models.layers.builder import ModelBuilder
from kernels.models.layers.moe import DEEPSEEK
from kernels.weights.tensors import TensorSpec

__all__ = ["build", "caches", "config", "tensors"]

_NAMES = dataclasses.replace(DEEPSEEK, correction="")

caches = gqa.caches


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    raw = ConfigReader({"first_k_dense_replace": 0, **raw.raw}, raw.architecture)
    sparse_layers, bias, windows = raw.later_layers(), raw.flag("attention_bias"), _windows(raw)
    forced = raw.size("prefix_dense_sliding_window_pattern", 1) == 1
    given = {"intermediate_size": raw.raw.get("prefix_dense_intermediate_size") or raw.raw.get("intermediate_size")}
    layer_norms = raw.raw.get("rms_norm_eps") is None
    plain = ConfigReader({**raw.raw, **given}, raw.architecture).decoder(
        qkv_bias=bias,
        output_bias=bias,
        windows=windows,
        experts=_experts(raw, sparse_layers),
        norm_eps="layer_norm_eps" if layer_norms else "rms_norm_eps",
        eps=1e-5,
        head_dim=128,
        tied=True,
    )
    nothing = dataclasses.replace(plain.rope, kind="none")
    still = [layer for layer, window in enumerate(windows) if not window and (layer in sparse_layers or not forced)]
    return dataclasses.replace(
        plain,
        rope_interleaved=True,
        parallel_residual=True,
        ropes=dict.fromkeys(still, nothing),
        logit_scale=raw.number("logit_scale", 0.0625),
    )


def _experts(raw: ConfigReader, layers: frozenset[int]) -> ExpertsConfig:
    count, chosen = raw.expert_counts()
    inner, alike = raw.size("intermediate_size"), raw.raw.get("num_shared_experts", 0)
    scores, joined = (
        raw.raw.get("expert_selection_fn", "softmax"),
        raw.raw.get("shared_expert_combination_strategy", "average"),
    )
    if type(alike) is not int or alike < 0:
        raise ConfigError(f"config.json: num_shared_experts must be a whole number, and is {alike!r}")
    if scores not in ("softmax", "sigmoid"):
        raise ConfigError(f"config.json: expert_selection_fn must be softmax or sigmoid, and is {scores!r}")
    if joined not in ("sum", "average"):
        raise ConfigError(f"config.json: shared_expert_combination_strategy must be sum or average, and is {joined!r}")
    return ExpertsConfig(
        layers,
        count,
        chosen,
        inner,
        normalized=scores == "softmax" or raw.flag("norm_topk_prob", True),
        shared=inner * alike,
        weighted=False,
        scores=scores,
        result_scale=0.5 if alike and joined == "average" else 1.0,
    )


def _windows(raw: ConfigReader) -> tuple[int, ...]:
    """By ``layer_types``, or every n-th layer sees all tokens, which dense and sparse layers count apart."""
    if raw.raw.get("layer_types") is not None or raw.raw.get("sliding_window", 0) is None:
        return raw.patterned_windows(4)
    first = raw.raw.get("first_k_dense_replace")
    if type(first) is not int or first < 0:
        raise ConfigError(f"config.json: first_k_dense_replace must be a whole number, and is {first!r}")
    window, dense = raw.size("sliding_window", 4096), raw.size("prefix_dense_sliding_window_pattern", 1)
    every = raw.size("sliding_window_pattern", 4)
    return tuple(
        window if ((layer + 1) % dense if layer < first else (layer - first + 1) % every) else 0
        for layer in range(raw.layers)
    )


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    return sparse.tensors(config, _NAMES)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    return sparse.build(config, builder, _NAMES, attention)
