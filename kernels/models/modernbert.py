"""ModernBERT (Warner et al., arXiv 2412.13663): an encoder with rotary positions, whose norms stand before attention
and gated feed-forward layers. In most layers a token attends only to those near it.

    h = norm(words[ids])
    for each layer:  h = h + attention(norm(h));  h = h + Wo(gelu(a) * b), where a | b = Wi(norm(h))
    h = norm(h)
    classes = classifier(norm(gelu(dense(pooled h))))

The first layer's attention has no norm. Layers with a window have a rotary base of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernels.contract.caches import CacheGroup
from kernels.contract.errors import ConfigError
from kernels.core.operators import Linear
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.encoder import Angles, Encoder, EncoderBatch, EncoderLayer, attend, rotated
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.weights.tensors import Role, TensorSpec, biased_norm, embedding, linear, norm

__all__ = ["build", "caches", "config", "tensors"]

_POSITIONS = 8192
_THETA = {"full_attention": ("global_rope_theta", 160_000.0), "sliding_attention": ("local_rope_theta", 10_000.0)}


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    hidden, heads = raw.size("hidden_size"), raw.size("num_attention_heads")
    window = raw.size("local_attention", 128)
    if hidden % heads:
        raise ConfigError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    if window < 2:
        raise ConfigError(f"config.json: local_attention must be at least 2 tokens, and is {window}")
    given = raw.raw.get("classifier_activation") or "gelu"
    if given != "gelu":
        raise ConfigError(f"classifier_activation {given!r} is not supported; {raw.architecture} is run with gelu")
    kinds, every = raw.layer_types(*_THETA), raw.size("global_attn_every_n_layers", 3)
    if not kinds:
        kinds = tuple("sliding_attention" if layer % every else "full_attention" for layer in range(raw.layers))
    own = {
        "rope_parameters": _ropes(raw),
        "head_dim": hidden // heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": raw.size("max_position_embeddings", _POSITIONS),
    }
    reader, bias = ConfigReader({**raw.raw, **own}, raw.architecture), raw.flag("attention_bias")
    plain = reader.decoder(
        qkv_bias=bias,
        output_bias=bias,
        windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds),
        activation="gelu",
        norm_eps="norm_eps",
        eps=1e-5,
        tied=True,
    )
    local = reader.local_rope(plain.head_dim, plain.rope.theta)
    return dataclasses.replace(
        plain,
        ropes={layer: local for layer, size in enumerate(plain.windows) if size},
        norm_bias=raw.flag("norm_bias"),
        head_bias=raw.flag("classifier_bias"),
    )


def _ropes(raw: ConfigReader) -> dict[str, dict[str, Any]]:
    """The rotation of each kind of layer, as newer files have it. In older ones null means the other layers' base."""
    if raw.raw.get("rope_scaling"):
        raise ConfigError(f"rope_scaling is not supported for {raw.architecture}; use rope_parameters by kind of layer")
    parameters = raw.raw.get("rope_parameters") or {}
    if not isinstance(parameters, dict) or not all(isinstance(parameters.get(kind) or {}, dict) for kind in _THETA):
        raise ConfigError(f"config.json: rope_parameters must be an object of {' and '.join(_THETA)}")
    result, theta = {}, 0.0
    for kind, (key, default) in _THETA.items():
        shared = theta and key in raw.raw and raw.raw[key] is None
        theta = theta if shared else raw.number(key, default)
        result[kind] = {"rope_theta": theta} | (parameters.get(kind) or {})
    return result


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint. Those of a model with a head have a prefix."""
    for spec in _encoder(config):
        yield dataclasses.replace(spec, aliases=(f"model.{spec.name}",))
    if _classifies(config) and config.pooling is not None:
        hidden = config.hidden_size
        yield from linear("head.dense", (hidden, hidden), bias=config.head_bias, role=Role.ROUTER)
        yield from _norm(config, "head.norm")
        yield from linear("classifier", (len(config.pooling.labels), hidden), bias=True, role=Role.ROUTER)


def _encoder(config: ModelConfig) -> Iterator[TensorSpec]:
    hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    yield embedding("embeddings.tok_embeddings", config.vocab_size, hidden)
    yield from _norm(config, "embeddings.norm")
    for index in range(config.layers):
        layer = f"layers.{index}"
        if index:
            yield from _norm(config, f"{layer}.attn_norm")
        yield from linear(f"{layer}.attn.Wqkv", (3 * hidden, hidden), bias=config.qkv_bias)
        yield from linear(f"{layer}.attn.Wo", (hidden, hidden), bias=config.output_bias)
        yield from _norm(config, f"{layer}.mlp_norm")
        yield from linear(f"{layer}.mlp.Wi", (2 * inner, hidden), bias=bias)
        yield from linear(f"{layer}.mlp.Wo", (hidden, inner), bias=bias, role=Role.DOWN)
    yield from _norm(config, "final_norm")


def _norm(config: ModelConfig, module: str) -> Iterator[TensorSpec]:
    if config.norm_bias:
        return biased_norm(module, config.hidden_size)
    return iter((norm(module, config.hidden_size),))


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """Nothing: an input runs whole."""
    return ()


def build(config: ModelConfig, builder: ModelBuilder) -> Encoder:
    """The encoder, with its head if it has one."""
    words = builder.ops.linear.make_lookup(builder.source.take(["embeddings.tok_embeddings.weight"]))
    first, last = (builder.layer_norm(name, eps=config.norm_eps) for name in ("embeddings.norm", "final_norm"))
    ropes = [config.ropes.get(layer, config.rope) for layer in range(config.layers)]
    context = builder.context or config.max_positions
    angles = {rope: Angles(rope, config.head_dim, builder, context) for rope in dict.fromkeys(ropes)}
    *others, final = [_layer(config, builder, layer, angles[rope]) for layer, rope in enumerate(ropes)]
    return Encoder(
        lambda batch: first(words(batch.ids)),
        [*others, lambda hidden, batch: last(final(hidden, batch))],
        _head(config, builder),
    )


def _layer(config: ModelConfig, builder: LayerBuilder, index: int, angles: Angles) -> EncoderLayer:
    name, heads, reach = f"layers.{index}", config.heads, config.windows[index] // 2
    before_attention = builder.layer_norm(f"{name}.attn_norm", eps=config.norm_eps) if index else None
    qkv, output = builder.linear(f"{name}.attn.Wqkv"), builder.linear(f"{name}.attn.Wo")
    before_mlp = builder.layer_norm(f"{name}.mlp_norm", eps=config.norm_eps)
    gated = builder.gated(f"{name}.mlp.Wi", activation=config.activation)
    down = builder.linear(f"{name}.mlp.Wo")

    def layer(hidden: Tensor, batch: EncoderBatch) -> Tensor:
        normed = hidden if before_attention is None else before_attention(hidden)
        parts = qkv(normed).unflatten(1, (3 * heads, -1))
        parts = torch.cat((rotated(parts[:, : 2 * heads], *angles(batch)), parts[:, 2 * heads :]), 1)
        hidden = hidden + output(attend(parts.flatten(1), heads, batch.lengths, reach=reach))
        return hidden + down(gated(before_mlp(hidden)))

    return layer


def _head(config: ModelConfig, builder: LayerBuilder) -> Linear | None:
    if not _classifies(config):
        return None
    dense = builder.ops.elementwise.activate(builder.linear("head.dense"), "gelu")
    norm, classifier = builder.layer_norm("head.norm", eps=config.norm_eps), builder.linear("classifier")
    return lambda x: classifier(norm(dense(x)))


def _classifies(config: ModelConfig) -> bool:
    return config.pooling is not None and config.pooling.task == "classify"
