"""Step 3.5 and 3.7 Flash (StepFun, https://huggingface.co/stepfun-ai/Step-3.5-Flash), their language model: layers with
a window have more query heads than those with full attention, and rotate otherwise. Each head's result has a gate.
Experts are chosen by a sigmoid and a correction, beside one that all tokens take; in some layers activations are
clamped. Norms add one to their weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kernels.contract.errors import ConfigError
from kernels.core.operators import Linear
from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, mlp, moe, pre_norm, sparse, vocabulary
from kernels.models.layers.block import Block, Norms, gated_mlp
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.models.layers.gated_attention import apart_gated
from kernels.models.layers.moe import ExpertNames, LimitedGate
from kernels.weights.tensors import TensorSpec, by_outputs, linear

__all__ = ["Step3p5Config", "build", "caches", "config", "head_config", "head_layer", "head_tensors", "tensors"]

_NAMES = ExpertNames(
    "moe",
    "gate_proj",
    "up_proj",
    "down_proj",
    shared="share_expert",
    correction="router_bias",
    gate_of_all="moe.gate_proj.weight",
    up_of_all="moe.up_proj.weight",
    down_of_all="moe.down_proj.weight",
    shared_beside=True,
)
_TRANSFORMERS_NAMES = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
    "max_seq_len": "max_position_embeddings",
}
"""Keys of the published files, and transformers'."""
_BY_LAYER = (
    "layer_types",
    "mlp_layer_types",
    "swiglu_limits",
    "swiglu_limits_shared",
    "rope_theta",
    "partial_rotary_factors",
    "use_rope_layers",
)
"""Lists that published files go on with for the heads for later tokens."""

caches = gqa.caches


@dataclass(frozen=True)
class Step3p5Config(ModelConfig):
    """``heads``: of layers with full attention. ``window_heads``: of the others, of the whole model. ``all_heads``: the
    whole model's ``heads``. ``limits``, ``shared_limits``: by layer, as ``LimitedGate``, of experts, and of the one
    that all tokens take or a layer without experts; 0: none."""

    window_heads: int = 0
    all_heads: int = 0
    limits: tuple[float, ...] = ()
    shared_limits: tuple[float, ...] = ()

    def layer(self, index: int) -> ModelConfig:
        """The sizes of a layer, on this rank if the others are. Raises ConfigError where heads cannot be divided."""
        if not self.windows[index]:
            return self
        heads, rest = divmod(self.window_heads * self.heads, self.all_heads)
        if rest:
            raise ConfigError(
                f"the {self.window_heads} heads of layers with a window cannot be divided by --tensor-parallel-size "
                f"{self.all_heads // self.heads}"
            )
        return dataclasses.replace(self, heads=heads, rope=self.ropes.get(index, self.rope))


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    raw = _as_transformers(raw)
    for key, only in (("moe_router_activation", "sigmoid"), ("norm_expert_weight", True)):
        if (value := raw.raw.get(key)) not in (None, only):
            raise ConfigError(f"config.json: {key} {value!r} is not supported; Step 3.5 is run with {only!r}")
    if not all(raw.raw.get("use_rope_layers") or ()):
        raise ConfigError("config.json: use_rope_layers must be true for each layer")
    count, chosen = raw.expert_counts()
    bias = raw.flag("mlp_bias")
    experts = ExpertsConfig(
        raw.later_layers(3),
        count,
        chosen,
        raw.size("moe_intermediate_size", 1280),
        normalized=True,
        shared=raw.size("share_expert_dim", 1280),
        weighted=False,
        scores="sigmoid",
        scale=raw.number("moe_router_scaling_factor", 1.0),
        corrected=True,
        shared_bias=bias,
    )
    kinds, bias = raw.layer_types("full_attention", "sliding_attention"), raw.flag("attention_bias")
    window = raw.size("sliding_window") if "sliding_attention" in kinds else 0
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    plain = raw.decoder(
        qkv_bias=bias, output_bias=bias, qk_norm=True, windows=windows, experts=experts, eps=1e-5, head_dim=128
    )
    local = raw.local_rope(plain.head_dim, 10000.0)
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    return Step3p5Config(
        **fields
        | {
            "ropes": {layer: local for layer, window in enumerate(plain.windows) if window},
            "norm_offset": 0.0 if raw.flag("whole_norms") else 1.0,
            "attention_scale": raw.number("query_pre_attn_scalar", plain.head_dim) ** -0.5,
        },
        window_heads=_window_heads(raw, plain),
        all_heads=plain.heads,
        limits=moe.limits(raw, "swiglu_limits"),
        shared_limits=moe.limits(raw, "swiglu_limits_shared"),
    )


def _as_transformers(raw: ConfigReader) -> ConfigReader:
    """The keys and lists of the published files in place of transformers'."""
    own = dict(raw.raw)
    for old, new in _TRANSFORMERS_NAMES.items():
        if own.get(new) is None and own.get(old) is not None:
            own[new] = own[old]
    for key in _BY_LAYER:
        if isinstance(own.get(key), list):
            own[key] = own[key][: raw.layers]
    if own.get("mlp_layer_types") is None and own.get("moe_layers_enum") is not None:
        own["mlp_layer_types"] = _feed_forwards(own, range(raw.layers))
    ropes = own.get("rope_parameters")
    if not isinstance(ropes, dict) or not {"full_attention", "sliding_attention"} & ropes.keys():
        own["rope_parameters"] = _ropes(ConfigReader(own, raw.architecture), ropes or {})
        own["rope_theta"] = own["rope_scaling"] = own["partial_rotary_factors"] = None
    return ConfigReader(own, raw.architecture)


def _feed_forwards(raw: Mapping[str, Any], layers: range) -> list[str]:
    """Which of the ``layers`` have experts, by ``moe_layers_enum``."""
    sparse_layers = raw.get("moe_layers_enum") or ""
    wrong = ConfigError(f"config.json: moe_layers_enum must name layers, and is {sparse_layers!r}")
    parts = sparse_layers.split(",") if isinstance(sparse_layers, str) else sparse_layers
    if not isinstance(parts, list | tuple):
        raise wrong
    names = [str(part).strip() for part in parts if str(part).strip()]
    if not all(name.isdecimal() for name in names):
        raise wrong
    named = set(map(int, names))
    return ["sparse" if layer in named else "dense" for layer in layers]


def head_config(raw: Mapping[str, Any], target: ModelConfig, name: str) -> Step3p5Config:
    """The sizes of a head for later tokens, a model of one layer: the one of this number in the lists of config.json
    ``raw``, in which heads follow the ``target``'s layers. Raises ConfigError."""
    layer = int(name.rpartition(".")[2])
    own = {**raw, "num_hidden_layers": 1, "mlp_layer_types": _feed_forwards(raw, range(layer, layer + 1))}
    for key in _BY_LAYER:
        if key != "mlp_layer_types" and isinstance(values := raw.get(key), list):
            if len(values) <= layer:
                raise ConfigError(f"config.json: {key} has no entry of layer {layer}, a head for later tokens")
            own[key] = [values[layer]]
    own |= {"per_layer_config": None, "architectures": ["Step3p5ForCausalLM"]}
    result = config(ConfigReader(own, "Step3p5ForCausalLM"))
    assert isinstance(result, Step3p5Config)
    if not result.windows[0]:
        return result
    heads = result.window_heads
    return dataclasses.replace(result, heads=heads, all_heads=heads, rope=result.ropes[0], ropes={})


def _ropes(raw: ConfigReader, common: object) -> dict[str, Any]:
    """``rope_parameters`` of each kind of layer, by lists of all layers. ``common``: of both kinds."""
    if not isinstance(common, dict):
        raise ConfigError(f"config.json: rope_parameters must be an object, and is {common!r}")
    kinds = raw.layer_types("full_attention", "sliding_attention") or ("full_attention",) * raw.layers
    result: dict[str, Any] = {}
    for kind in dict.fromkeys(kinds):
        result[kind] = part = dict(common)
        for key, name in (("rope_theta", "rope_theta"), ("partial_rotary_factors", "partial_rotary_factor")):
            values = raw.raw.get(key)
            if isinstance(values, list):
                own = [value for value, other in zip(values, kinds, strict=False) if other == kind]
                if len(values) != raw.layers or own != own[:1] * len(own):
                    raise ConfigError(f"config.json: {key} must have one number for each layer, alike by layer_types")
                values = own[0]
            if values is not None:
                part[name] = values
    if scaling := raw.raw.get("rope_scaling"):
        only = raw.raw.get("yarn_only_types", ["full_attention"])
        if not isinstance(scaling, dict) or only != ["full_attention"]:
            raise ConfigError(f"config.json: rope_scaling must be an object, for full_attention alone, not {only!r}")
        result.setdefault("full_attention", {}).update(scaling)
    return result


def _window_heads(raw: ConfigReader, plain: ModelConfig) -> int:
    """Query heads of layers with a window: ``num_sliding_attention_heads``, or of ``attention_other_setting``; keys
    must have the sizes of all layers."""
    other = raw.raw.get("attention_other_setting") or {}
    if not isinstance(other, dict):
        raise ConfigError(f"config.json: attention_other_setting must be an object, and is {other!r}")
    for key, size in (("num_attention_groups", plain.kv_heads), ("head_dim", plain.head_dim)):
        if other.get(key, size) != size:
            raise ConfigError(f"config.json: attention_other_setting.{key} {other[key]!r} must be {size}, as others'")
    usual = ConfigReader(other, raw.architecture).size("num_attention_heads", plain.heads)
    heads = raw.size("num_sliding_attention_heads", usual)
    if heads % plain.kv_heads:
        raise ConfigError(
            f"config.json: num_sliding_attention_heads {heads} is not a multiple of num_key_value_heads "
            f"{plain.kv_heads}"
        )
    own = {str(layer): {"num_attention_heads": heads} for layer, window in enumerate(plain.windows) if window}
    if (by_layer := raw.raw.get("per_layer_config")) and by_layer != own:
        raise ConfigError("config.json: per_layer_config must say num_sliding_attention_heads of layers with a window")
    return heads


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    return sparse.tensors(config, _NAMES, _tensors)


def _tensors(config: ModelConfig, module: str, gguf: str) -> Iterator[TensorSpec]:
    assert isinstance(config, Step3p5Config)
    yield from _attention_tensors(config.layer(int(module.split(".")[2])), module, gguf)


def _attention_tensors(own: ModelConfig, module: str, gguf: str) -> Iterator[TensorSpec]:
    yield from gqa.tensors(own, module, gguf)
    rows = by_outputs((own.heads, own.heads))
    yield from linear(f"{module}.g_proj", (own.heads, own.hidden_size), rows, f"{gguf}_gate")


def head_tensors(config: ModelConfig, name: str) -> Iterator[TensorSpec]:
    """The tensors of the layer of a head for later tokens, of the sizes of ``head_config``."""
    assert isinstance(config, Step3p5Config)
    yield from pre_norm.norm_tensors(config, name, "")
    yield from _attention_tensors(config.layer(0), f"{name}.self_attn", "")
    if config.experts is not None and config.experts.layers:
        yield from moe.tensors(config.experts, config.hidden_size, name, "", _NAMES)
    else:
        yield from mlp.tensors(config, f"{name}.mlp", "")


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    assert isinstance(config, Step3p5Config)
    vocab = vocabulary.vocabulary(builder, config)
    layers = [_layer(config, builder, index, f"model.layers.{index}") for index in range(config.layers)]
    return Decoder(builder, config, vocab, layers, builder.norm("model.norm", config.norm_eps, config.norm_offset))


def head_layer(config: ModelConfig, builder: LayerBuilder, name: str) -> Block:
    """The layer of ``head_tensors``, on one rank."""
    assert isinstance(config, Step3p5Config)
    return _layer(config, builder, 0, name)


def _layer(config: Step3p5Config, builder: LayerBuilder, index: int, name: str) -> Block:
    own = config.layer(index)
    norms = Norms(
        before_attention=builder.norm(f"{name}.input_layernorm", config.norm_eps, config.norm_offset),
        before_mlp=builder.norm(f"{name}.post_attention_layernorm", config.norm_eps, config.norm_offset),
    )
    attention = apart_gated(builder, own, f"{name}.self_attn", config.windows[index], "g_proj")
    return Block(builder, own, attention, _feed_forward(config, builder, index, name), norms)


def _feed_forward(config: Step3p5Config, builder: LayerBuilder, index: int, layer: str) -> Linear:
    experts, limit, shared_limit = config.experts, config.limits[index], config.shared_limits[index]
    gate, shared_gate = (LimitedGate(one) if one else None for one in (limit, shared_limit))
    if experts is not None and index in experts.layers:
        return moe.SparseFeedForward(builder, experts, layer, _NAMES, gate, shared_gate)
    builder = sparse.dense_builder(builder, config)
    if shared_gate is None:
        return gated_mlp(builder, config, f"{layer}.mlp")
    inner = moe.gated_by(builder, shared_gate, f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj")
    down = builder.row_parallel(f"{layer}.mlp.down_proj")
    return lambda x: down(inner(x))
