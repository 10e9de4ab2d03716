"""What config.json says of a decoder, checked and with every default resolved.

Only the families named in ``FAMILIES`` are read; no code of a checkpoint is ever run. Keys follow the Hugging Face
configuration files, both with the older ``rope_theta`` / ``rope_scaling`` / ``torch_dtype`` and with the newer
``rope_parameters`` / ``dtype`` spellings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "FAMILIES",
    "MOST_EXPERTS",
    "ConfigError",
    "ExpertsConfig",
    "Family",
    "ModelConfig",
    "RopeConfig",
    "parse_config",
    "read_config",
    "read_json",
    "read_merged",
]


MOST_EXPERTS = 4096
"""Of a layer. Whatever a file says, no more names than of models are made of it."""
_MOST_LAYERS = 4096
_MOST_SIZE = 1 << 31
_MOST_EXPERTS_OF_ALL = 1 << 20
"""Of all layers together."""


class ConfigError(ValueError):
    """config.json (or what was merged over it) does not describe a model that can be run."""


@dataclass(frozen=True)
class Family:
    """How a family differs from the plain decoder when config.json is silent."""

    qkv_bias: bool = False  # q, k and v have a bias, whatever attention_bias says
    qk_norm: bool = False  # RMS norm over head_dim of each query and key head
    window_switch: bool = False  # sliding_window counts only with use_sliding_window, from layer max_window_layers on
    window_even: bool = False  # with window_switch: it counts for the even ones of those before that layer instead
    window: bool = False  # sliding_window counts for every layer when it is set
    experts: str = ""  # how its feed-forward layers of experts are described: as qwen or mixtral do; empty: it has none
    shared: bool = False  # besides the experts that it takes, a token takes one that all take


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MiMoForCausalLM": Family(qkv_bias=True, window_switch=True),  # Qwen2 with heads for the tokens after the next
    "MistralForCausalLM": Family(window=True),
    "MixtralForCausalLM": Family(window=True, experts="mixtral"),
    "Qwen2ForCausalLM": Family(qkv_bias=True, window_switch=True),
    "Qwen2MoeForCausalLM": Family(qkv_bias=True, window_switch=True, window_even=True, experts="qwen", shared=True),
    "Qwen3ForCausalLM": Family(qk_norm=True, window_switch=True),
    "Qwen3MoeForCausalLM": Family(qk_norm=True, window_switch=True, experts="qwen"),
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. ``kind``: default | linear | llama3 | yarn | factors.

    Dynamic NTK scaling changes nothing up to ``max_position_embeddings`` and is read as default.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_length: int = 0  # tokens the model was trained on before scaling
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: scales cos and sin; None: from factor
    mscale: float = 0.0  # yarn
    mscale_all_dim: float = 0.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    factors: tuple[float, ...] = ()  # factors: each pair of dimensions is stretched by its own


@dataclass(frozen=True)
class ExpertsConfig:
    """Feed-forward layers of which a token takes a few of many (Shazeer et al., arXiv 1701.06538).

    ``layers``: which of the decoder's. ``chosen``: experts that a token takes. ``normalized``: whether their weights
    are made to add up to one. ``shared``: the inner dimension of an expert that all tokens take besides, weighted by
    the sigmoid of a logit of its own (``shared_expert_gate``); 0: there is none. ``block``, ``gate``, ``up``, ``down``:
    what a checkpoint calls the block of a layer, and an expert's projections.
    """

    layers: frozenset[int]
    count: int
    chosen: int
    inner: int
    normalized: bool
    shared: int = 0
    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's sizes. ``windows[layer]`` is the layer's sliding window in tokens, 0 for full attention."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: RopeConfig
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    windows: tuple[int, ...]
    dtype: str | None  # as stored; None when config.json does not say
    experts: ExpertsConfig | None = None


def read_config(model_path: str | Path, overrides: str = "{}", quantized: bool = False) -> ModelConfig:
    """Parse ``model_path/config.json`` with the JSON object ``overrides`` merged over it.

    ``model_path`` may also be a GGUF file, whose metadata says the same. Nested objects are merged key by key; other
    values replace. ``quantized``: whether weights may be; what becomes of them is found by
    ``kernels.quantization.recognise``. Raises ConfigError, saying what to do.
    """
    return parse_config(read_merged(model_path, overrides), quantized)


def read_merged(model_path: str | Path, overrides: str) -> dict[str, Any]:
    """``read_json`` with the JSON object ``overrides`` merged over it. Raises ConfigError, saying what to do."""
    raw = read_json(model_path)
    try:
        extra = json.loads(overrides or "{}")
    except ValueError as error:
        raise ConfigError(f"the model override arguments are not JSON: {error}") from error
    if not isinstance(extra, dict):
        raise ConfigError("the model override arguments must be a JSON object")
    return _merge(raw, extra)


def read_json(model_path: str | Path) -> dict[str, Any]:
    """``model_path/config.json`` as it is, or as it would be for a GGUF file. Raises ConfigError, saying what to do."""
    if Path(model_path).is_file():
        from kernels.gguf.description import describe
        from kernels.gguf.header import read_header

        return describe(read_header(model_path))
    path = Path(model_path) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist; give a directory with config.json and *.safetensors (a Hugging Face checkpoint)"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}); download the checkpoint again") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must be a JSON object; download the checkpoint again")
    return raw


def parse_config(raw: Mapping[str, Any], quantized: bool = False) -> ModelConfig:
    """Check a config.json object. Raises ConfigError, naming the key."""
    family_name, family = _family(raw)
    if raw.get("quantization_config") and not quantized:
        raise ConfigError("this checkpoint is quantized (quantization_config); use the bf16 or fp32 checkpoint instead")
    if (activation := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ConfigError(f"hidden_act {activation!r} is not supported; {family_name} is run with silu")
    hidden, heads = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
    kv_heads = _size(raw, "num_key_value_heads", heads)
    head_dim = _size(raw, "head_dim", hidden // heads)
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise ConfigError(f"head_dim {head_dim} is odd; rotary embeddings need an even one")
    layers = _size(raw, "num_hidden_layers", most=_MOST_LAYERS)
    max_positions = _size(raw, "max_position_embeddings")
    rope = _rope(raw, max_positions, head_dim)
    if rope.kind == "yarn":
        max_positions = max(max_positions, int(rope.original_length * rope.factor))
    attention_bias = bool(raw.get("attention_bias", False))
    qkv_bias = family.qkv_bias and (not family.shared or bool(raw.get("qkv_bias", True)))
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    return ModelConfig(
        architecture=family_name,
        vocab_size=_size(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(raw, "intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        max_positions=max_positions,
        rope=rope,
        qkv_bias=qkv_bias or attention_bias,
        output_bias=attention_bias and not family.qkv_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        windows=_windows(raw, family, layers),
        dtype=str(dtype).removeprefix("torch.") if dtype else None,
        experts=_experts(raw, family, layers),
    )


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _family(raw: Mapping[str, Any]) -> tuple[str, Family]:
    names = raw.get("architectures") or []
    for name in names if isinstance(names, list) else [names]:
        if isinstance(name, str) and name in FAMILIES:
            return name, FAMILIES[name]
    raise ConfigError(
        f"no supported architecture in config.json (architectures: {names}); "
        f"supported are {', '.join(sorted(FAMILIES))}"
    )


def _size(raw: Mapping[str, Any], key: str, default: int | None = None, most: int = _MOST_SIZE) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json: {key} must be a whole number of at least 1, and is {value!r}")
    if value > most:
        raise ConfigError(f"config.json: {key} must be at most {most}, and is {value}; is the file damaged?")
    return value


def _experts(raw: Mapping[str, Any], family: Family, layers: int) -> ExpertsConfig | None:
    if not family.experts:
        return None
    mixtral = family.experts == "mixtral"
    key = "num_experts" if "num_experts" in raw else "num_local_experts"  # tools write either
    most = min(MOST_EXPERTS, _MOST_EXPERTS_OF_ALL // layers)
    count, chosen = _size(raw, key, most=most), _size(raw, "num_experts_per_tok")
    if chosen > count:
        raise ConfigError(f"config.json: num_experts_per_tok {chosen} is more than {key} {count}")
    if mixtral:
        inner, names = _size(raw, "intermediate_size"), ("block_sparse_moe", "w1", "w3", "w2")
        return ExpertsConfig(frozenset(range(layers)), count, chosen, inner, True, 0, *names)
    plain, step = raw.get("mlp_only_layers") or [], _size(raw, "decoder_sparse_step", 1)
    if not isinstance(plain, list) or not all(type(layer) is int for layer in plain):
        raise ConfigError(f"config.json: mlp_only_layers must be a list of layers, and is {plain!r}")
    sparse = frozenset(layer for layer in range(layers) if layer not in plain and (layer + 1) % step == 0)
    normalized = bool(raw.get("norm_topk_prob", False))
    shared = _size(raw, "shared_expert_intermediate_size") if family.shared else 0
    return ExpertsConfig(sparse, count, chosen, _size(raw, "moe_intermediate_size"), normalized, shared)


def _windows(raw: Mapping[str, Any], family: Family, layers: int) -> tuple[int, ...]:
    window = raw.get("sliding_window")
    on = family.window or (family.window_switch and bool(raw.get("use_sliding_window", False)))
    if not on or window is None:
        return (0,) * layers
    window = _size(raw, "sliding_window")
    kinds = raw.get("layer_types")
    if kinds is not None:
        known = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
            raise ConfigError("config.json: layer_types must say full_attention or sliding_attention for each layer")
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    first = raw.get("max_window_layers", 28) if family.window_switch else 0
    if type(first) is not int or first < 0:
        raise ConfigError(f"config.json: max_window_layers must be a whole number, and is {first!r}")
    if family.window_even:
        return tuple(window if layer % 2 == 0 and layer < first else 0 for layer in range(layers))
    return tuple(window if layer >= first else 0 for layer in range(layers))


def _number(raw: Mapping[str, Any], key: str, default: float) -> float:
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ConfigError(f"config.json: {key} must be a number above 0, and is {value!r}")
    return float(value)


def _factors(given: object, head_dim: int) -> tuple[float, ...]:
    """Of rope_freqs in a GGUF file."""
    if not isinstance(given, list) or len(given) != head_dim // 2:
        raise ConfigError(f"rope_type factors needs {head_dim // 2} factors")
    if not all(isinstance(factor, float) and math.isfinite(factor) and factor > 0 for factor in given):
        raise ConfigError("rope_type factors needs numbers above 0")
    return tuple(given)


def _rope(raw: Mapping[str, Any], max_positions: int, head_dim: int) -> RopeConfig:
    given: dict[str, Any] = {"rope_theta": raw.get("rope_theta")}
    given["partial_rotary_factor"] = raw.get("partial_rotary_factor")
    given["original_max_position_embeddings"] = raw.get("original_max_position_embeddings")
    for key in ("rope_scaling", "rope_parameters"):
        part = raw.get(key) or {}
        if not isinstance(part, dict):
            raise ConfigError(f"config.json: {key} must be an object, and is {part!r}")
        given.update({name: value for name, value in part.items() if value is not None})
    theta = _number(given, "rope_theta", 10000.0)
    kind = given.get("rope_type") or given.get("type") or "default"
    if _number(given, "partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("partial_rotary_factor other than 1 is not supported")
    if kind in ("default", "dynamic"):
        return RopeConfig(theta=theta)
    if kind == "factors":
        return RopeConfig(theta=theta, kind=kind, factors=_factors(given.get("factors"), head_dim))
    if kind not in ("linear", "llama3", "yarn"):
        raise ConfigError(f"rope_type {kind!r} is not supported; supported are default, linear, llama3, yarn, dynamic")
    original = given["original_max_position_embeddings"]
    if kind == "llama3" and original is None:
        raise ConfigError("rope_type llama3 needs original_max_position_embeddings")
    original_length = _size(given, "original_max_position_embeddings", max_positions)
    attention_factor = given.get("attention_factor")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=_number(given, "factor", max_positions / original_length),
        original_length=original_length,
        low_freq_factor=_number(given, "low_freq_factor", 1.0),
        high_freq_factor=_number(given, "high_freq_factor", 4.0),
        beta_fast=_number(given, "beta_fast", 32.0),
        beta_slow=_number(given, "beta_slow", 1.0),
        attention_factor=None if attention_factor is None else _number(given, "attention_factor", 1.0),
        mscale=_number(given, "mscale", 0.0) if given.get("mscale") else 0.0,
        mscale_all_dim=_number(given, "mscale_all_dim", 0.0) if given.get("mscale_all_dim") else 0.0,
        truncate=bool(given.get("truncate", True)),
    )
