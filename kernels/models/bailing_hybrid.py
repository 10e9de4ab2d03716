"""Ling 3 (Ling Team, https://huggingface.co/inclusionAI/Ling-3.0-flash): Kimi delta attention in all but the last of a
group of layers, which has latent attention whose heads are gated; experts that a sigmoid scores and a correction
balances, in groups.

In Kimi delta attention ``f`` and ``g`` have a matrix each, and decays have a lower bound:

    decay = kda_lower_bound * sigmoid(exp(A_log) * (f(x) + dt_bias))

Checkpoints hold a further layer for the token after the next, after the first ``num_hidden_layers``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kernels.contract.caches import CacheGroup
from kernels.contract.errors import ConfigError
from kernels.core.operators import Linear
from kernels.models import kimi_linear
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import kimi_delta, mla, mlp, moe, pre_norm, recurrent, sparse, vocabulary
from kernels.models.layers.block import AttentionLayer, Block, Norms, gated_mlp
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.models.layers.delta_net import DeltaConfig, sizes
from kernels.models.layers.gated_attention import ApartGates
from kernels.models.layers.moe import DEEPSEEK, LimitedGate
from kernels.weights.tensors import Role, TensorSpec, by_outputs, linear

__all__ = [
    "BailingHybridConfig",
    "build",
    "caches",
    "config",
    "head_config",
    "head_layer",
    "head_tensors",
    "tensors",
]

_NAMES = dataclasses.replace(DEEPSEEK, correction="gate.expert_bias")
_EMBED = "model.word_embeddings"
_DEFAULTS: dict[str, Any] = {
    "n_group": 8,
    "n_shared_experts": 1,
    "rope_theta": 6e6,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}
_LIMITS = "expert_swiglu_limit_list", "share_expert_swiglu_limit_list"
_FIXED: dict[str, Any] = {
    "gated_attention_proj_granularity_type": "head_wise",
    "moe_router_enable_expert_bias": True,
    "no_kda_lora": True,
    "num_kv_heads_for_linear_attn": 0,
    "score_function": "sigmoid",
    "scale_router_input": False,
    "topk_method": "noaux_tc",
    "up_proj_norm": False,
    "use_bias": False,
    "use_kda_lora": False,
    "use_mla_nope": False,
    "use_nGPT": False,
    "use_qkv_bias": False,
    "value_norm": False,
}
"""Keys of config.json, and the only values for which the layers below are right."""


@dataclass(frozen=True)
class BailingHybridConfig(ModelConfig):
    """``decay_bound``: the least logarithm of a decay; 0: decays are Kimi Linear's. ``limits``, ``shared_limits``: by
    layer, as ``LimitedGate``, of experts, and of the one that all tokens take; 0: none."""

    decay_bound: float = 0.0
    limits: tuple[float, ...] = ()
    shared_limits: tuple[float, ...] = ()


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    for key, only in _FIXED.items():
        if (value := raw.raw.get(key)) not in (None, only):
            raise ConfigError(f"config.json: {key} {value!r} is not supported; Ling 3 is run with {only!r}")
    reader = kimi_linear.usual_keys(raw)
    reader = ConfigReader({**_DEFAULTS, **reader.raw}, raw.architecture)
    experts = reader.deepseek_experts(reader.later_layers(2), "sigmoid", pair_sum=True)
    if (inner := reader.size("moe_shared_expert_intermediate_size", experts.inner)) != experts.inner:
        raise ConfigError(
            f"config.json: moe_shared_expert_intermediate_size {inner} is not supported; Ling 3 is run with "
            f"moe_intermediate_size, {experts.inner}"
        )
    plain = reader.latent_decoder(experts=dataclasses.replace(experts, wide_router=True))
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    return BailingHybridConfig(
        **fields | {"recurrence": _delta(reader), "recurrent": _delta_layers(reader)},
        decay_bound=_bound(reader),
        limits=_limits(reader, _LIMITS[0]),
        shared_limits=_limits(reader, _LIMITS[1]),
    )


def _delta(raw: ConfigReader) -> DeltaConfig:
    """The sizes of the delta layers. transformers overwrites ``head_dim`` by that of rotated heads when it saves, and
    adds ``linear_head_dim``."""
    dim = raw.size("linear_head_dim", raw.size("head_dim", 128))
    heads = raw.size("linear_num_heads", raw.size("num_attention_heads"))
    taps = raw.size("linear_conv_kernel_dim", raw.size("short_conv_kernel_size", 4))
    return DeltaConfig(heads, heads, dim, dim, taps)


def _delta_layers(raw: ConfigReader) -> frozenset[int]:
    """By ``layer_types``, or all but each ``layer_group_size``-th."""
    kinds = raw.layer_types("linear_attention", "full_attention")
    if kinds:
        return frozenset(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
    layers, group = raw.layers, raw.size("layer_group_size", 6)
    if layers % group:  # transformers and the vendor's code have other layers in what is left
        raise ConfigError(
            f"config.json: num_hidden_layers {layers} is not a multiple of layer_group_size {group}; add layer_types"
        )
    return frozenset(layer for layer in range(layers) if (layer + 1) % group)


def _bound(raw: ConfigReader) -> float:
    """``kda_lower_bound``, which is read only with ``kda_safe_gate``; else 0."""
    if not raw.flag("kda_safe_gate", True):
        return 0.0
    value = raw.raw.get("kda_lower_bound", -5.0)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value < 0:
        raise ConfigError(f"config.json: kda_lower_bound must be a number below 0, and is {value!r}")
    return float(value)


def _limits(raw: ConfigReader, key: str) -> tuple[float, ...]:
    """As ``moe.limits``; what the list says of heads for later tokens is left out."""
    values = raw.raw.get(key)
    own = {key: values[: raw.layers] if isinstance(values, list) else values}
    return moe.limits(ConfigReader({**raw.raw, **own}, raw.architecture), key)


def head_config(raw: Mapping[str, Any], target: ModelConfig, name: str) -> BailingHybridConfig:
    """The sizes of a head for later tokens, a model of one layer with latent attention and experts: the one of this
    number in the lists of config.json ``raw``. Raises ConfigError."""
    assert isinstance(target, BailingHybridConfig)
    layer = int(name.rpartition(".")[2])
    if raw.get("mtp_use_kda"):
        raise ConfigError("config.json: mtp_use_kda is not supported: heads for later tokens have latent attention")
    limits = []
    for key in _LIMITS:
        values = raw.get(key)
        own = values[layer : layer + 1] if isinstance(values, list) else values
        limits.append(moe.limits(ConfigReader({"num_hidden_layers": 1, key: own}, target.architecture), key))
    assert target.experts is not None
    return dataclasses.replace(
        target,
        layers=1,
        windows=(0,),
        experts=dataclasses.replace(target.experts, layers=frozenset((0,))),
        recurrence=None,
        recurrent=frozenset(),
        limits=limits[0],
        shared_limits=limits[1],
    )


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    yield from vocabulary.tensors(config, _EMBED)
    for index in range(config.layers):
        yield from _layer_tensors(config, index, f"model.layers.{index}")
    yield from pre_norm.stream_norm(config, "model.norm")


def head_tensors(config: ModelConfig, name: str) -> Iterator[TensorSpec]:
    """The tensors of the layer of a head for later tokens."""
    return _layer_tensors(config, 0, name)


def _layer_tensors(config: ModelConfig, index: int, name: str) -> Iterator[TensorSpec]:
    experts = config.experts
    assert experts is not None
    yield from pre_norm.norm_tensors(config, name, "")
    attend = _delta_tensors if index in config.recurrent else _latent_tensors
    yield from attend(config, f"{name}.attention")
    if index in experts.layers:
        yield from moe.tensors(experts, config.hidden_size, name, "", _NAMES)
    else:
        for spec in mlp.tensors(config, f"{name}.mlp", ""):
            yield dataclasses.replace(spec, split=None) if config.whole_dense else spec


def _delta_tensors(config: ModelConfig, module: str) -> Iterator[TensorSpec]:
    delta = sizes(config)
    heads, width = delta.value_heads, delta.values
    for spec in kimi_delta.tensors(config, module):
        dense = (f"{module}.dense.weight",) if spec.module == f"{module}.o_proj" else ()  # which transformers saves
        yield dataclasses.replace(spec, gguf=None, aliases=dense)
    for part in "fg":
        yield from linear(f"{module}.{part}_proj", (width, config.hidden_size), by_outputs((width, heads)))
    yield TensorSpec(f"{module}.A_log", (heads,), Role.WIDE, by_outputs((heads, heads)))


def _latent_tensors(config: ModelConfig, module: str) -> Iterator[TensorSpec]:
    heads = config.heads
    for spec in mla.tensors(config, module, ""):
        yield dataclasses.replace(spec, gguf=None, name=spec.name.replace(f"{module}.o_proj", f"{module}.dense"))
    yield from linear(f"{module}.g_proj", (heads, config.hidden_size), by_outputs((heads, heads)))


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """Latent vectors of the layers with attention, states of the others."""
    return recurrent.with_attention(config, mla.caches(config))


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    assert isinstance(config, BailingHybridConfig)
    vocab = vocabulary.vocabulary(builder, config, _EMBED)
    layers = [_layer(config, builder, index, f"model.layers.{index}") for index in range(config.layers)]
    return Decoder(builder, config, vocab, layers, builder.norm("model.norm", config.norm_eps))


def head_layer(config: ModelConfig, builder: LayerBuilder, name: str) -> Block:
    """The layer of ``head_tensors``, on one rank."""
    assert isinstance(config, BailingHybridConfig)
    return _layer(config, builder, 0, name)


def _layer(config: BailingHybridConfig, builder: LayerBuilder, index: int, name: str) -> Block:
    experts = config.experts
    assert experts is not None
    norms = Norms(
        before_attention=builder.norm(f"{name}.input_layernorm", config.norm_eps),
        before_mlp=builder.norm(f"{name}.post_attention_layernorm", config.norm_eps),
    )
    attend = _delta_attention if index in config.recurrent else _latent_attention
    attention = attend(builder, config, f"{name}.attention")
    feed_forward: Linear
    if index in experts.layers:
        limits = config.limits[index], config.shared_limits[index]
        gate, shared_gate = (LimitedGate(limit) if limit else None for limit in limits)
        feed_forward = moe.SparseFeedForward(builder, experts, name, _NAMES, gate, shared_gate)
    else:
        feed_forward = gated_mlp(sparse.dense_builder(builder, config), config, f"{name}.mlp")
    return Block(builder, config, attention, feed_forward, norms)


def _delta_attention(builder: LayerBuilder, config: BailingHybridConfig, module: str) -> AttentionLayer:
    delta = sizes(config)
    projection = builder.linear(*(f"{module}.{part}_proj" for part in "qkvbfg"))
    if config.decay_bound:
        decays = kimi_delta.bounded_decays(builder, config, module, config.decay_bound)
    else:
        decays = kimi_delta.softplus_decays(builder, config, module)

    def project(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mixed, b, f, g = projection(x).split((delta.channels, delta.value_heads, delta.values, delta.values), 1)
        return mixed, b, f, g

    return kimi_delta.layer(builder, config, module, project, decays)


def _latent_attention(builder: LayerBuilder, config: BailingHybridConfig, module: str) -> AttentionLayer:
    inner = mla.LatentAttention(builder, config, module, output=lambda x: x)
    return ApartGates(builder, inner, config.heads, f"{module}.g_proj", f"{module}.dense")
