"""Hunyuan's dense models (Tencent, https://github.com/Tencent-Hunyuan): Llama's decoder, whose query and key heads are
normed after they are rotated.

A rotation leaves a head's length as it is. So heads are divided by it before, and the product of both norms' weights is
that of the rotated queries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from kernels.contract.errors import ConfigError
from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, sparse
from kernels.models.layers.block import SelfAttention
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.weights.tensors import TensorSpec, norm

__all__ = ["attention", "attention_tensors", "build", "caches", "config", "decoder", "tensors"]

caches = gqa.caches


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    return decoder(raw)


def decoder(raw: ConfigReader, experts: ExpertsConfig | None = None) -> ModelConfig:
    """The sizes in config.json. ``alpha`` of its rotation stretches the base (NTK-aware scaling)."""
    for key, plain_value in (("use_cla", False), ("use_qk_norm", True), ("moe_layer_num_skipped", 0)):
        if raw.raw.get(key) not in (None, plain_value):
            raise ConfigError(f"config.json: {key} {raw.raw[key]!r} is not supported; {plain_value!r} is")
    bias, own = raw.flag("attention_bias"), dict[str, Any]()
    for key in ("rope_scaling", "rope_parameters"):
        part = raw.raw.get(key)
        if isinstance(part, dict) and part.get("alpha") is not None:
            given = ConfigReader({"rope_theta": raw.raw.get("rope_theta"), **part}, raw.architecture)
            dim = raw.size("head_dim", raw.size("hidden_size") // raw.size("num_attention_heads"))
            base = given.number("rope_theta", 10000.0) * given.number("alpha", 1.0) ** (dim / (dim - 2))
            own[key] = {"rope_type": "default", "rope_theta": base}
    reader = ConfigReader({**raw.raw, **own}, raw.architecture)
    plain = reader.decoder(qkv_bias=bias, output_bias=bias, experts=experts, eps=1e-5)
    return dataclasses.replace(plain, late_norms=True)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    return sparse.tensors(config, attention=attention_tensors)


def attention_tensors(config: ModelConfig, module: str, gguf: str) -> Iterator[TensorSpec]:
    """The tensors of a layer's attention."""
    yield from gqa.tensors(config, module, gguf)
    yield norm(f"{module}.query_layernorm", config.head_dim, f"{gguf}_q_norm")
    yield norm(f"{module}.key_layernorm", config.head_dim, f"{gguf}_k_norm")


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    return sparse.build(config, builder, attention=attention)


def attention(builder: LayerBuilder, config: ModelConfig, module: str, window: int) -> SelfAttention:
    """The layer of ``attention_tensors``."""
    queries, keys = (builder.source.take([f"{module}.{part}_layernorm.weight"]) for part in ("query", "key"))
    ones = torch.ones((config.heads + config.kv_heads, config.head_dim), dtype=keys.dtype, device=keys.device)
    return SelfAttention(
        builder,
        config,
        gqa.projection(builder, config, f"{module}.q_proj", f"{module}.k_proj", f"{module}.v_proj"),
        builder.row_parallel(f"{module}.o_proj"),
        window,
        norm=builder.ops.elementwise.make_norm(ones, config.norm_eps),
        weights=(queries.float() * keys.float()).to(keys.dtype),
    )
