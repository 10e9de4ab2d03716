"""Kimi Linear (Kimi Team, arXiv 2510.26692): three of four layers are Kimi delta attention, the others latent attention
without positions; experts that a sigmoid scores and a correction balances.

Kimi delta attention is a gated delta net in which each number of a key decays by itself:

    decay = -exp(A_log) * softplus(f_b(f_a(x)) + dt_bias);   o_proj(norm(delta_rule) * sigmoid(g_b(g_a(x))))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contract.caches import CacheGroup
from kernels.contract.errors import ConfigError
from kernels.devices.delta_rule import DeltaInputs
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import mla, recurrent, sparse
from kernels.models.layers.block import AttentionLayer
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.models.layers.delta_net import DeltaConfig, GatedDeltaNet, sizes
from kernels.models.layers.moe import ExpertNames
from kernels.models.layers.recurrent import CausalConvolution
from kernels.weights.tensors import GgufPlace, Role, Split, TensorSpec, by_inputs, by_outputs, linear, norm

__all__ = ["build", "caches", "config", "tensors"]

_NAMES = ExpertNames(
    "block_sparse_moe",
    "w1",
    "w3",
    "w2",
    shared="shared_experts",
    correction="gate.e_score_correction_bias",
    shared_parts=("gate_proj", "up_proj", "down_proj"),
)
_KEYS = {
    "max_position_embeddings": "model_max_length",
    "n_group": "num_expert_group",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
}
"""What config.json calls keys of other families."""


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    if (scores := raw.raw.get("moe_router_activation_func", "sigmoid")) != "sigmoid":
        raise ConfigError(f"moe_router_activation_func {scores!r} is not supported; supported is sigmoid")
    if not raw.raw.get("mla_use_nope", True):
        raise ConfigError("mla_use_nope false is not supported: attention is run without positions")
    renamed = {key: raw.raw[name] for key, name in _KEYS.items() if raw.raw.get(name) is not None}
    inner = ConfigReader({"norm_topk_prob": True, **raw.raw, **renamed}, raw.architecture)
    experts = inner.deepseek_experts(inner.later_layers(1), "sigmoid", pair_sum=True)
    plain = inner.latent_decoder(experts=experts, eps=1e-5)
    delta, layers = _delta(inner)
    return dataclasses.replace(
        plain,
        rope=dataclasses.replace(plain.rope, kind="none"),
        rope_interleaved=False,
        recurrence=delta,
        recurrent=layers,
    )


def _delta(raw: ConfigReader) -> tuple[DeltaConfig, frozenset[int]]:
    """The sizes of the delta layers, and which these are: ``linear_attn_config`` counts them from 1."""
    given = raw.raw.get("linear_attn_config") or {}
    if not isinstance(given, dict):
        raise ConfigError(f"config.json: linear_attn_config must be an object, and is {given!r}")
    own: dict[str, Any] = {
        "linear_head_dim": given.get("head_dim", raw.raw.get("linear_head_dim", 128)),
        "linear_num_heads": given.get("num_heads", raw.raw.get("linear_num_heads", 32)),
        "linear_conv_kernel_dim": given.get("short_conv_kernel_size", raw.raw.get("linear_conv_kernel_dim", 4)),
    }
    reader = ConfigReader(own, raw.architecture)
    heads, dim = reader.size("linear_num_heads"), reader.size("linear_head_dim")
    delta = DeltaConfig(heads, heads, dim, dim, reader.size("linear_conv_kernel_dim"))
    kinds = raw.layer_types("linear_attention", "full_attention")
    if kinds:
        return delta, frozenset(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
    if "kda_layers" not in given:
        return delta, frozenset(layer for layer in range(raw.layers) if layer == 0 or layer % 4)
    listed, full = given["kda_layers"], given.get("full_attn_layers")
    both = [*listed, *full] if isinstance(listed, list) and isinstance(full, list) else []
    if not all(type(layer) is int for layer in both) or sorted(both) != list(range(1, raw.layers + 1)):
        raise ConfigError("config.json: kda_layers and full_attn_layers must name each layer once, from 1 on")
    return delta, frozenset(layer - 1 for layer in listed)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    return sparse.mixed_tensors(config, _mixer_tensors, _NAMES)


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """Latent vectors of the layers with attention, states of the others."""
    return recurrent.with_attention(config, mla.caches(config))


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    return sparse.build_mixed(config, builder, _mixer, _NAMES)


def _mixer_tensors(config: ModelConfig, index: int) -> Iterator[TensorSpec]:
    module, gguf = f"model.layers.{index}.self_attn", f"blk.{index}"
    if index in config.recurrent:
        return _delta_tensors(config, module, gguf)
    return mla.tensors(config, module, f"{gguf}.attn")


def _delta_tensors(config: ModelConfig, module: str, gguf: str) -> Iterator[TensorSpec]:
    delta, hidden = sizes(config), config.hidden_size
    heads, dim, width = delta.value_heads, delta.value_dim, delta.values
    by_head = by_outputs((width, heads))
    for part in "qkv":
        yield from linear(f"{module}.{part}_proj", (width, hidden), by_head, f"{gguf}.attn_{part}")
        place = GgufPlace(f"{gguf}.ssm_conv1d_{part}.weight")
        yield TensorSpec(f"{module}.{part}_conv1d.weight", (width, 1, delta.taps), Role.WIDE, by_head, place)
    for part in "fg":
        yield from linear(f"{module}.{part}_a_proj", (dim, hidden), None, f"{gguf}.ssm_{part}_a")
        yield from linear(f"{module}.{part}_b_proj", (width, dim), by_head, f"{gguf}.ssm_{part}_b")
    yield from linear(f"{module}.b_proj", (heads, hidden), by_outputs((heads, heads)), f"{gguf}.ssm_beta")
    decays, place = Split(2, ((heads, heads),)), GgufPlace(f"{gguf}.ssm_a", exponent=True)
    yield TensorSpec(f"{module}.A_log", (1, 1, heads, 1), Role.WIDE, decays, place)
    yield TensorSpec(f"{module}.dt_bias", (width,), Role.WIDE, by_head, GgufPlace(f"{gguf}.ssm_dt.bias"))
    yield norm(f"{module}.o_norm", dim, f"{gguf}.ssm_norm")
    yield from linear(f"{module}.o_proj", (hidden, width), by_inputs(width, heads), f"{gguf}.attn_output")


def _mixer(builder: LayerBuilder, config: ModelConfig, index: int) -> AttentionLayer:
    module = f"model.layers.{index}.self_attn"
    if index not in config.recurrent:
        return mla.attention(builder, config, module, 0)
    delta, source = sizes(config), builder.source
    heads, dim = delta.value_heads, delta.value_dim
    first = builder.linear(*(f"{module}.{part}_proj" for part in ("q", "k", "v", "b", "f_a", "g_a")))
    forget, gate = builder.linear(f"{module}.f_b_proj"), builder.linear(f"{module}.g_b_proj")
    factor, offset = -source.take([f"{module}.A_log"]).exp().view(heads, 1), source.take([f"{module}.dt_bias"])

    def inputs(x: Tensor) -> DeltaInputs:
        mixed, b, f, g = first(x).split((delta.channels, heads, dim, dim), 1)
        decays = F.softplus(forget(f.contiguous()).float() + offset).view(-1, heads, dim) * factor
        return DeltaInputs(mixed, gate(g.contiguous()), torch.sigmoid(b.float()), decays)

    return GatedDeltaNet(
        builder,
        delta,
        inputs,
        CausalConvolution(source.take([f"{module}.{part}_conv1d.weight" for part in "qkv"])),
        builder.norm(f"{module}.o_norm", config.norm_eps),
        builder.row_parallel(f"{module}.o_proj"),
        sigmoid=True,
    )
