"""MiMo-V2-Flash (Xiaomi, arXiv 2601.02780): in all layers but the first and every sixth, heads see a short window and
have sinks; these layers have twice as many key heads and rotate with a base of their own. Values are shorter than keys
and scaled; here they are filled with zeros, so that one cache holds both. Experts are DeepSeek V3's, without a shared
one.

MiMo-V2.5 (https://huggingface.co/XiaomiMiMo/MiMo-V2.5) has one projection for queries, keys and values, whose rows are
those of ``num_key_value_heads`` parts, each with its queries, keys and values, and with blocks of scales of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contract.caches import CacheGroup, Paged, Window
from kernels.contract.errors import ConfigError
from kernels.core.operators import Linear
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import mlp, sparse
from kernels.models.layers.block import Block, Norms, SelfAttention, gated_mlp
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.models.layers.gqa import head_order
from kernels.models.layers.moe import DEEPSEEK
from kernels.weights.tensors import GgufPlace, Role, TensorSpec, by_inputs, by_outputs, linear, norm

__all__ = ["build", "caches", "config", "head_config", "head_layer", "head_tensors", "tensors"]


@dataclass(frozen=True)
class MiMoV2Config(ModelConfig):
    """``kv_heads``: of layers with a window. ``full_kv_heads``: of the others, of the whole model. ``all_heads``: the
    whole model's. ``value_dim``: numbers of a value; ``value_scale`` multiplies them. ``fused``: whether one projection
    makes queries, keys and values, in ``full_kv_heads`` parts."""

    full_kv_heads: int = 0
    all_heads: int = 0
    value_dim: int = 0
    value_scale: float = 1.0
    fused: bool = False

    @property
    def attention_features(self) -> Mapping[str, str]:
        """As ``ModelConfig``."""
        return {**super().attention_features, "sizes": "attention with heads of two sizes"}

    def layer(self, index: int) -> ModelConfig:
        """The sizes of a layer, on this rank if the others are."""
        if self.windows[index]:
            return self
        return dataclasses.replace(self, kv_heads=max(1, self.full_kv_heads * self.heads // self.all_heads))


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    raw = _as_transformers(raw)
    ropes = raw.raw.get("rope_parameters")
    windows = _windows(raw)
    experts = ConfigReader(
        {"norm_topk_prob": True, **raw.raw, "n_shared_experts": None}, raw.architecture
    ).deepseek_experts(raw.later_layers(1), "sigmoid", pair_sum=True)
    full = raw.size("num_key_value_heads", min(4, max(1, raw.size("num_attention_heads") // 2)))
    kv_heads = raw.size("swa_num_key_value_heads", 2 * full)
    bias, dim = raw.flag("attention_bias"), raw.size("head_dim", 192)
    values = raw.size("v_head_dim", 128)
    if values > dim:
        raise ConfigError(f"config.json: v_head_dim {values} is more than head_dim {dim}")
    own: dict[str, Any] = {"num_key_value_heads": kv_heads}
    if ropes is None:
        part = raw.number("partial_rotary_factor", 0.334)
        own["rope_parameters"] = {
            "full_attention": {"rope_theta": raw.number("rope_theta", 5000000.0), "partial_rotary_factor": part},
            "sliding_attention": {"rope_theta": raw.number("swa_rope_theta", 10000.0), "partial_rotary_factor": part},
        }
    elif isinstance(ropes, dict):
        own["rope_parameters"] = {
            kind: {"partial_rotary_factor": 0.334, **part} if isinstance(part, dict) else part
            for kind, part in ropes.items()
        }
    reader = ConfigReader({**raw.raw, **own}, raw.architecture)
    plain = reader.decoder(qkv_bias=bias, windows=windows, experts=experts, eps=1e-5, head_dim=192)
    local = reader.local_rope(dim, 10000.0)
    if local.dim != plain.rope.dim:
        raise ConfigError("config.json: rope_parameters rotates other parts of heads in windows than in full attention")
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    return MiMoV2Config(
        **fields | {"sinks": True, "ropes": {layer: local for layer, window in enumerate(windows) if window}},
        full_kv_heads=full,
        all_heads=plain.heads,
        value_dim=values,
        value_scale=raw.number("attention_value_scale", 0.707) if raw.raw.get("attention_value_scale", 1) else 1.0,
        fused=_fused(raw, kv_heads, full),
    )


def _fused(raw: ConfigReader, kv_heads: int, full: int) -> bool:
    """Whether queries, keys and values have one projection."""
    layout, heads = raw.raw.get("attention_projection_layout") or "split", raw.size("num_attention_heads")
    if layout not in ("split", "fused_qkv"):
        raise ConfigError(f"attention_projection_layout {layout!r} is not supported; supported are split, fused_qkv")
    if layout == "split":
        return False
    settings = raw.raw.get("quantization_config")
    if not isinstance(settings, dict) or settings.get("quant_method") != "fp8":
        raise ConfigError(
            "config.json: attention_projection_layout fused_qkv is read with quant_method fp8 alone: tools that write "
            "other files change the order of rows, and no setting says so; use the published checkpoint"
        )
    if kv_heads % full or heads % full:
        raise ConfigError(
            f"config.json: attention_projection_layout fused_qkv has num_key_value_heads {full} parts, which must "
            f"divide num_attention_heads {heads} and swa_num_key_value_heads {kv_heads}"
        )
    return True


def _as_transformers(raw: ConfigReader) -> ConfigReader:
    """The lists of the published files in place of transformers'."""
    own = dict(raw.raw)
    pattern, sparse_layers = own.pop("hybrid_layer_pattern", None), own.pop("moe_layer_freq", None)
    if isinstance(pattern, list) and own.get("layer_types") is None:
        own["layer_types"] = ["sliding_attention" if one else "full_attention" for one in pattern]
    if isinstance(sparse_layers, list) and own.get("mlp_layer_types") is None:
        own["mlp_layer_types"] = ["sparse" if one else "dense" for one in sparse_layers]
    if type(size := own.get("sliding_window_size")) is int:  # tokens before a query
        own["sliding_window"] = size + 1
    if own.get("routed_scaling_factor", 1.0) is None:
        own["routed_scaling_factor"] = 1.0
    if own.get("layernorm_epsilon") is not None:
        own.setdefault("rms_norm_eps", own["layernorm_epsilon"])
    if isinstance(rope := own.get("rope_parameters"), dict) and not any(
        isinstance(part, dict) for part in rope.values()
    ):
        own["rope_parameters"] = {
            "full_attention": rope,
            "sliding_attention": rope | {"rope_theta": raw.number("swa_rope_theta", 10000.0)},
        }
    for key, other in (
        ("swa_num_attention_heads", "num_attention_heads"),
        ("swa_head_dim", "head_dim"),
        ("swa_v_head_dim", "v_head_dim"),
    ):
        if own.get(key) is not None and own[key] != own.get(other, own[key]):
            raise ConfigError(f"config.json: {key} {own[key]!r} is not supported; supported is {other}, {own[other]!r}")
    for key, value in (("add_full_attention_sink_bias", False), ("add_swa_attention_sink_bias", True)):
        if own.get(key, value) is not value:
            raise ConfigError(f"config.json: {key} {own[key]!r} is not supported; supported is {value!r}")
    return ConfigReader(own, raw.architecture)


def _windows(raw: ConfigReader) -> tuple[int, ...]:
    """By ``layer_types``; the first and every sixth layer see all tokens where config.json has none."""
    given = ConfigReader({"sliding_window": 129, **raw.raw}, raw.architecture)
    if raw.raw.get("layer_types") is None:
        window = given.size("sliding_window")
        return tuple(window if layer and (layer + 1) % 6 else 0 for layer in range(raw.layers))
    return given.patterned_windows(6)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    return sparse.tensors(config, DEEPSEEK, _tensors)


def _tensors(config: ModelConfig, module: str, gguf: str) -> Iterator[TensorSpec]:
    return _attention_tensors(config, int(module.split(".")[2]), module, gguf)


def _attention_tensors(config: ModelConfig, index: int, module: str, gguf: str) -> Iterator[TensorSpec]:
    assert isinstance(config, MiMoV2Config)
    own, hidden, heads, bias = config.layer(index), config.hidden_size, config.heads, config.qkv_bias
    queries, keys, values = (
        heads * config.head_dim,
        own.kv_heads * config.head_dim,
        own.kv_heads * config.value_dim,
    )
    by_key_head, by_value = by_outputs((keys, own.kv_heads)), by_outputs((values, own.kv_heads))
    if config.fused:
        rows, parts = queries + keys + values, config.full_kv_heads
        for spec in linear(f"{module}.qkv_proj", (rows, hidden), by_outputs((rows, parts)), bias=bias):
            yield dataclasses.replace(spec, stripes=parts)
    else:
        yield from linear(f"{module}.q_proj", (queries, hidden), by_outputs((queries, heads)), f"{gguf}_q", bias=bias)
        yield from linear(f"{module}.k_proj", (keys, hidden), by_key_head, f"{gguf}_k", bias=bias)
        yield from linear(f"{module}.v_proj", (values, hidden), by_value, f"{gguf}_v", bias=bias)
    width = heads * config.value_dim
    yield from linear(f"{module}.o_proj", (hidden, width), by_inputs(width, heads), f"{gguf}_output")
    if config.windows[index]:
        name, split = f"{module}.attention_sink_bias", by_outputs((heads, heads))
        place = GgufPlace(f"{gguf}_sinks.weight")
        yield TensorSpec(name, (heads,), Role.WIDE, split, place, (f"{module}.sinks",))


def head_config(raw: Mapping[str, Any], target: ModelConfig, name: str) -> ModelConfig:
    """The sizes of a head for later tokens, a model of one layer with a window and without experts. Raises
    ConfigError."""
    layer = next((layer for layer, window in enumerate(target.windows) if window), None)
    if layer is None:
        raise ConfigError("config.json: heads for later tokens see a window, and layer_types names no layer with one")
    rope = target.ropes[layer]
    return dataclasses.replace(target, layers=1, windows=(target.windows[layer],), experts=None, rope=rope, ropes={})


def head_tensors(config: ModelConfig, name: str) -> Iterator[TensorSpec]:
    """The tensors of the layer of a head for later tokens."""
    for part in ("input_layernorm", "pre_mlp_layernorm"):
        yield norm(f"{name}.{part}", config.hidden_size)
    yield from _attention_tensors(config, 0, f"{name}.self_attn", "")
    yield from mlp.tensors(config, f"{name}.mlp", "")


def head_layer(config: ModelConfig, builder: LayerBuilder, name: str) -> Block:
    """The layer of ``head_tensors``, on one rank."""
    norms = Norms(
        before_attention=builder.norm(f"{name}.input_layernorm", config.norm_eps),
        before_mlp=builder.norm(f"{name}.pre_mlp_layernorm", config.norm_eps),
    )
    attention = _layer_attention(builder, config, 0, f"{name}.self_attn")
    return Block(builder, config, attention, gated_mlp(builder, config, f"{name}.mlp"), norms)


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """Keys and values of all tokens, or of a window."""
    assert isinstance(config, MiMoV2Config)
    groups: dict[Paged | Window, list[int]] = {}
    for index, window in enumerate(config.windows):
        paged = Paged(config.layer(index).kv_heads, config.head_dim, config.head_dim)
        groups.setdefault(Window(paged, window) if window else paged, []).append(index)
    return tuple(CacheGroup(spec, tuple(layers)) for spec, layers in groups.items())


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    return sparse.build(config, builder, DEEPSEEK, _attention)


def _attention(builder: LayerBuilder, config: ModelConfig, module: str, window: int) -> SelfAttention:
    return _layer_attention(builder, config, int(module.split(".")[2]), module)


def _layer_attention(builder: LayerBuilder, config: ModelConfig, index: int, module: str) -> SelfAttention:
    assert isinstance(config, MiMoV2Config)
    own, window = config.layer(index), config.windows[index]
    dim, short, scale = config.head_dim, config.value_dim, config.value_scale
    order, rotated = head_order(config) or range(dim), own.heads + own.kv_heads
    projections = (
        [builder.ordered(_places(own, order), f"{module}.qkv_proj")]
        if config.fused
        else [
            builder.ordered(
                [head * dim + place for head in range(rotated) for place in order],
                f"{module}.q_proj",
                f"{module}.k_proj",
            ),
            builder.linear(f"{module}.v_proj"),
        ]
    )
    output = builder.row_parallel(f"{module}.o_proj")

    def qkv(x: Tensor) -> Tensor:
        made = torch.cat([projection(x) for projection in projections], 1)
        heads, values = made[:, : rotated * dim], made[:, rotated * dim :]
        filled = F.pad(values.view(len(x), own.kv_heads, short) * scale, (0, dim - short))
        return torch.cat((heads, filled.flatten(1)), 1)

    def cut(x: Tensor) -> Tensor:
        return output(x.view(len(x), own.heads, dim)[..., :short].flatten(1))

    compose = builder.ops.elementwise.compose
    sinks = builder.source.take([f"{module}.attention_sink_bias"]) if window else None
    made: Linear = compose(qkv, lambda x: x)
    plain = "sizes" not in builder.ops.attention.plans
    return SelfAttention(builder, own, made, compose(cut, lambda x: x), window, sinks=sinks, plain=plain)


def _places(own: ModelConfig, order: Sequence[int]) -> list[int]:
    """The rows of this rank's part of a fused projection in the order of queries, keys and values, the numbers of each
    rotated head in ``order``. ``own``: the sizes of the layer."""
    assert isinstance(own, MiMoV2Config)
    parts = own.full_kv_heads * own.heads // own.all_heads
    if not parts:
        raise ConfigError(
            f"attention_projection_layout fused_qkv has {own.full_kv_heads} parts (num_key_value_heads), which are not "
            f"divided further; use a --tensor-parallel-size of at most {own.full_kv_heads}"
        )
    dim, queries, keys = own.head_dim, own.heads // parts, own.kv_heads // parts
    rows = (queries + keys) * dim + keys * own.value_dim
    starts = [
        part * rows + first + head * dim
        for first, count in ((0, queries), (queries * dim, keys))
        for part in range(parts)
        for head in range(count)
    ]
    result = [start + place for start in starts for place in order]
    first = (queries + keys) * dim
    return result + [part * rows + place for part in range(parts) for place in range(first, rows)]
