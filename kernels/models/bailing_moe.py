"""Ling and Ring (Ling Team, arXiv 2503.05139; Ling 2.0, arXiv 2510.22115): one projection of queries, keys and values,
whose heads may be normed and rotated in part; experts beside one that all tokens take. Those of Ling 2.0 are chosen as
DeepSeek V3's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from kernels.contract.errors import ConfigError
from kernels.core.operators import Linear
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, mlp, moe, pre_norm, vocabulary
from kernels.models.layers.block import Block, Norms, SelfAttention, gated_mlp
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.models.layers.moe import DEEPSEEK
from kernels.weights.tensors import TensorSpec, by_inputs, by_outputs, linear, norm

__all__ = ["build", "caches", "config", "head_config", "head_layer", "head_tensors", "tensors"]

_NAMES = dataclasses.replace(DEEPSEEK, correction="")
_CORRECTED = dataclasses.replace(DEEPSEEK, correction="gate.expert_bias")
_EMBED = "model.word_embeddings"

caches = gqa.caches


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    scores = raw.raw.get("score_function") or "softmax"
    if scores not in ("softmax", "sigmoid"):
        raise ConfigError(f"config.json: score_function must be softmax or sigmoid, and is {scores!r}")
    own = {"n_shared_experts": raw.raw.get("num_shared_experts"), "norm_topk_prob": raw.flag("norm_topk_prob", True)}
    given = ConfigReader({**raw.raw, **own}, raw.architecture)
    experts = given.deepseek_experts(raw.later_layers(), scores, pair_sum=True)
    corrected = scores == "sigmoid" and raw.flag("moe_router_enable_expert_bias", True)
    plain = raw.decoder(
        qkv_bias=raw.flag("use_qkv_bias"),
        output_bias=raw.flag("use_bias"),
        qk_norm=raw.flag("use_qk_norm"),
        experts=dataclasses.replace(experts, corrected=corrected),
        theta=600000.0,
    )
    head_norm = "columns" if raw.flag("norm_head") and not plain.tied_embeddings else ""
    return dataclasses.replace(plain, head_norm=head_norm, qkv_apart=raw.flag("qkv_apart"))


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    yield from vocabulary.tensors(config, _EMBED)
    for index in range(config.layers):
        yield from _layer_tensors(config, index, f"model.layers.{index}", f"blk.{index}")
    yield from pre_norm.stream_norm(config, "model.norm", "output_norm")


def _layer_tensors(config: ModelConfig, index: int, layer: str, gguf: str) -> Iterator[TensorSpec]:
    hidden, heads, kv_heads, dim, experts = (
        config.hidden_size,
        config.heads,
        config.kv_heads,
        config.head_dim,
        config.experts,
    )
    assert experts is not None
    queries, keys, names = heads * dim, kv_heads * dim, _CORRECTED if experts.corrected else _NAMES
    module, parts = f"{layer}.attention", by_outputs((queries, heads), (keys, kv_heads), (keys, kv_heads))
    yield from pre_norm.norm_tensors(config, layer, gguf)
    width, bias = queries + 2 * keys, config.qkv_bias
    if config.qkv_apart:
        own = ((queries, heads, heads), (keys, kv_heads, kv_heads), (keys, kv_heads, 0))
        for part, (rows, units, rotated) in zip("qkv", own, strict=True):
            yield from linear(
                f"{module}.{part}_proj",
                (rows, hidden),
                by_outputs((rows, units)),
                f"{gguf}.attn_{part}",
                bias=bias,
                rotary_heads=rotated,
            )
    else:
        yield from linear(f"{module}.query_key_value", (width, hidden), parts, f"{gguf}.attn_qkv", bias=bias)
    output, inputs = f"{module}.dense", by_inputs(queries, heads)
    yield from linear(output, (hidden, queries), inputs, f"{gguf}.attn_output", bias=config.output_bias)
    if config.qk_norm:
        yield norm(f"{module}.query_layernorm", dim, f"{gguf}.attn_q_norm")
        yield norm(f"{module}.key_layernorm", dim, f"{gguf}.attn_k_norm")
    if index in experts.layers:
        yield from moe.tensors(experts, hidden, layer, gguf, names)
    else:
        yield from mlp.tensors(config, f"{layer}.mlp", f"{gguf}.ffn")


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config, _EMBED)
    layers = [_layer(config, builder, index, f"model.layers.{index}") for index in range(config.layers)]
    return Decoder(builder, config, vocab, layers, builder.norm("model.norm", config.norm_eps))


def head_config(raw: Mapping[str, Any], target: ModelConfig, name: str) -> ModelConfig:
    """The sizes of a head for later tokens, a model of one layer with experts."""
    assert target.experts is not None
    experts = dataclasses.replace(target.experts, layers=frozenset((0,)))
    return dataclasses.replace(target, layers=1, windows=target.windows[:1], experts=experts)


def head_tensors(config: ModelConfig, name: str) -> Iterator[TensorSpec]:
    """The tensors of the layer of a head for later tokens."""
    return _layer_tensors(config, 0, name, "")


def head_layer(config: ModelConfig, builder: LayerBuilder, name: str) -> Block:
    """The layer of ``head_tensors``, on one rank."""
    return _layer(config, builder, 0, name)


def _layer(config: ModelConfig, builder: LayerBuilder, index: int, name: str) -> Block:
    experts = config.experts
    assert experts is not None
    norms = Norms(
        before_attention=builder.norm(f"{name}.input_layernorm", config.norm_eps),
        before_mlp=builder.norm(f"{name}.post_attention_layernorm", config.norm_eps),
    )
    feed_forward: Linear
    if index in experts.layers:
        names = _CORRECTED if experts.corrected else _NAMES
        feed_forward = moe.SparseFeedForward(builder, experts, name, names)
    else:
        feed_forward = gated_mlp(builder, config, f"{name}.mlp")
    return Block(builder, config, _attention(config, builder, f"{name}.attention"), feed_forward, norms)


def _attention(config: ModelConfig, builder: LayerBuilder, module: str) -> SelfAttention:
    heads = None
    if config.qk_norm:
        names, counts = (f"{module}.query_layernorm", f"{module}.key_layernorm"), (config.heads, config.kv_heads)
        heads = builder.head_norms(*names, *counts, config.norm_eps, order=gqa.head_order(config))
    parts = [f"{part}_proj" for part in "qkv"] if config.qkv_apart else ["query_key_value"]
    qkv = gqa.projection(builder, config, *(f"{module}.{part}" for part in parts))
    return SelfAttention(builder, config, qkv, builder.row_parallel(f"{module}.dense"), 0, norm=heads)
