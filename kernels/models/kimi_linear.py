"""Kimi Linear (Kimi Team, arXiv 2510.26692): three of four layers are Kimi delta attention, the others latent attention
without positions; experts that a sigmoid scores and a correction balances.

In Kimi delta attention ``f = f_b(f_a(x))``, of which decays are ``-exp(A_log) * softplus(f + dt_bias)``, and
``g = g_b(g_a(x))``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from kernels.contract.caches import CacheGroup
from kernels.contract.errors import ConfigError
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import kimi_delta, mla, recurrent, sparse
from kernels.models.layers.block import AttentionLayer
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.models.layers.delta_net import DeltaConfig, sizes
from kernels.models.layers.moe import ExpertNames
from kernels.weights.tensors import GgufPlace, Role, Split, TensorSpec, by_outputs, linear

__all__ = ["build", "caches", "config", "tensors", "usual_keys"]

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
    inner = usual_keys(raw)
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


def usual_keys(raw: ConfigReader) -> ConfigReader:
    """``raw`` with the keys of other families; the chosen experts' weights add up to one if it says nothing."""
    renamed = {key: raw.raw[name] for key, name in _KEYS.items() if raw.raw.get(name) is not None}
    return ConfigReader({"norm_topk_prob": True, **raw.raw, **renamed}, raw.architecture)


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
    """Every tensor of a checkpoint; transformers, and adapters made with it, have other names for some modules."""
    for spec in sparse.mixed_tensors(config, _mixer_tensors, _NAMES):
        other = spec.name.replace(".self_attn.f_", ".self_attn.forget_gate.f_")
        other = other.replace(".block_sparse_moe.shared_experts.", ".mlp.shared_experts.")
        yield spec if other == spec.name else dataclasses.replace(spec, aliases=(*spec.aliases, other))


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
    yield from kimi_delta.tensors(config, module, gguf)
    for part in "fg":
        yield from linear(f"{module}.{part}_a_proj", (dim, hidden), None, f"{gguf}.ssm_{part}_a")
        yield from linear(f"{module}.{part}_b_proj", (width, dim), by_outputs((width, heads)), f"{gguf}.ssm_{part}_b")
    decays, place = Split(2, ((heads, heads),)), GgufPlace(f"{gguf}.ssm_a", exponent=True)
    yield TensorSpec(f"{module}.A_log", (1, 1, heads, 1), Role.WIDE, decays, place)


def _mixer(builder: LayerBuilder, config: ModelConfig, index: int) -> AttentionLayer:
    module = f"model.layers.{index}.self_attn"
    if index not in config.recurrent:
        return mla.attention(builder, config, module, 0)
    delta = sizes(config)
    first = builder.linear(*(f"{module}.{part}_proj" for part in ("q", "k", "v", "b", "f_a", "g_a")))
    forget, gate = builder.linear(f"{module}.f_b_proj"), builder.linear(f"{module}.g_b_proj")

    def project(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mixed, b, f, g = first(x).split((delta.channels, delta.value_heads, delta.value_dim, delta.value_dim), 1)
        return mixed, b, forget(f.contiguous()), gate(g.contiguous())

    return kimi_delta.layer(builder, config, module, project, kimi_delta.softplus_decays(builder, config, module))
