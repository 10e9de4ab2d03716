"""ChatGLM2, ChatGLM3 and the first files of GLM-4 (Team GLM, arXiv 2406.12793): one projection of queries, keys and
values, heads of which neighbors in the first half rotate against one another, and gates and others in one projection.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from kernels.contract.errors import ConfigError
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, vocabulary
from kernels.models.layers.builder import ModelBuilder
from kernels.models.layers.gqa import Attention, Heads
from kernels.models.layers.mlp import FeedForward
from kernels.models.layers.pre_norm import PreNormLayer
from kernels.weights.tensors import Role, TensorSpec, by_inputs, by_outputs, linear, norm

__all__ = ["build", "caches", "config", "tensors"]

_EMBED, _HEAD, _NORM = (
    "transformer.embedding.word_embeddings",
    "transformer.output_layer",
    "transformer.encoder.final_layernorm",
)
_SIZES = {
    "num_hidden_layers": "num_layers",
    "vocab_size": "padded_vocab_size",
    "intermediate_size": "ffn_hidden_size",
    "head_dim": "kv_channels",
    "max_position_embeddings": "seq_length",
    "rms_norm_eps": "layernorm_epsilon",
}
"""The names that other families have for these sizes."""
_ALWAYS: dict[str, Any] = {
    "rmsnorm": True,
    "post_layer_norm": True,
    "apply_residual_connection_post_layernorm": False,
    "add_bias_linear": False,
    "original_rope": True,
}

caches = gqa.caches


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    for key, value in _ALWAYS.items():
        if raw.flag(key, value) != value:
            raise ConfigError(f"config.json: {key} must be {value}, and is {raw.raw[key]!r}")
    own = {name: raw.raw.get(key, raw.raw.get(name)) for name, key in _SIZES.items()}
    names = {**_SIZES, "num_key_value_heads": "multi_query_group_num"}
    own["num_key_value_heads"] = raw.raw.get("multi_query_group_num") if raw.flag("multi_query_attention") else None
    own["rope_theta"] = 10000.0 * raw.number("rope_ratio", 1.0)
    plain = ConfigReader({**raw.raw, **own}, raw.architecture, names).decoder(
        qkv_bias=raw.flag("add_qkv_bias", True), eps=1e-5, rotary=0.5
    )
    return dataclasses.replace(plain, rope_interleaved=True)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    hidden, inner, heads, kv_heads = config.hidden_size, config.intermediate_size, config.heads, config.kv_heads
    queries, keys = heads * config.head_dim, kv_heads * config.head_dim
    parts, pair = by_outputs((queries, heads), (keys, kv_heads), (keys, kv_heads)), by_outputs(*[(inner, inner)] * 2)
    yield from vocabulary.tensors(config, _EMBED, _HEAD)
    for index in range(config.layers):
        layer = f"transformer.encoder.layers.{index}"
        yield norm(f"{layer}.input_layernorm", hidden)
        yield norm(f"{layer}.post_attention_layernorm", hidden)
        attention, width = f"{layer}.self_attention", queries + 2 * keys
        yield from linear(f"{attention}.query_key_value", (width, hidden), parts, bias=config.qkv_bias)
        yield from linear(f"{attention}.dense", (hidden, queries), by_inputs(queries, heads))
        yield from linear(f"{layer}.mlp.dense_h_to_4h", (2 * inner, hidden), pair)
        yield from linear(f"{layer}.mlp.dense_4h_to_h", (hidden, inner), by_inputs(inner, inner), role=Role.DOWN)
    yield norm(_NORM, hidden)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config, _EMBED, _HEAD)
    layers = [_layer(config, builder, f"transformer.encoder.layers.{index}") for index in range(config.layers)]
    return Decoder(builder, config, vocab, layers, builder.norm(_NORM, config.norm_eps))


def _layer(config: ModelConfig, builder: ModelBuilder, name: str) -> PreNormLayer:
    first = builder.norm(f"{name}.input_layernorm", config.norm_eps)
    heads = Heads(config.heads, config.kv_heads, config.head_dim)
    qkv = gqa.projection(builder, config, f"{name}.self_attention.query_key_value")
    attention = Attention(builder, heads, qkv, builder.into_stream(f"{name}.self_attention.dense"), 0)
    second = builder.norm(f"{name}.post_attention_layernorm", config.norm_eps)
    gate_up, down = builder.gated(f"{name}.mlp.dense_h_to_4h"), builder.into_stream(f"{name}.mlp.dense_4h_to_h")
    return PreNormLayer(builder, first, attention, second, FeedForward(builder, second, gate_up, down))
