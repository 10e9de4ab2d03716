"""Arcee's Trinity (AFMoE, https://huggingface.co/arcee-ai/Trinity-Mini): layers with a window rotate heads, those with
full attention have no positions; a gate for each number of attention's result; norms before and after both halves of a
layer; experts that a sigmoid scores and a correction balances.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kernels.contract.errors import ConfigError
from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, mlp, moe, vocabulary
from kernels.models.layers.block import Block, Norms, gated_mlp
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.models.layers.gated_attention import apart_gated
from kernels.models.layers.moe import ExpertNames
from kernels.weights.tensors import TensorSpec, by_outputs, linear, norm

__all__ = ["build", "caches", "config", "tensors"]

_NAMES = ExpertNames(
    "mlp",
    "gate_proj",
    "up_proj",
    "down_proj",
    shared="shared_experts",
    router="router.gate",
    correction="expert_bias",
)
_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_mlp_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
"""Before and after attention, before and after the feed-forward layer, and their names in GGUF files."""

caches = gqa.caches


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    count, chosen = raw.expert_counts()
    plain_layers, alike = _count(raw, "num_dense_layers", 1), _count(raw, "num_shared_experts", 2)
    inner, bias = raw.size("moe_intermediate_size"), raw.flag("attention_bias")
    experts = ExpertsConfig(
        frozenset(range(plain_layers, raw.layers)),
        count,
        chosen,
        inner,
        normalized=True,
        shared=inner * alike,
        weighted=False,
        scores="sigmoid",
        scale=raw.number("route_scale", 1.0),
        corrected=True,
    )
    windows = ConfigReader({"sliding_window": 1024, **raw.raw}, raw.architecture).patterned_windows(
        raw.size("global_attn_every_n_layers", 4)
    )
    plain = raw.decoder(
        qkv_bias=bias, output_bias=bias, qk_norm=True, windows=windows, experts=experts, eps=1e-5, head_dim=128
    )
    nothing = dataclasses.replace(plain.rope, kind="none")
    return dataclasses.replace(
        plain,
        ropes={layer: nothing for layer, window in enumerate(windows) if not window},
        embedding_scale=plain.hidden_size**0.5 if raw.flag("mup_enabled") else 1.0,
    )


def _count(raw: ConfigReader, key: str, default: int) -> int:
    value = raw.raw.get(key, default)
    if type(value) is not int or value < 0:
        raise ConfigError(f"config.json: {key} must be a whole number, and is {value!r}")
    return value


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    hidden, heads, experts = config.hidden_size, config.heads, config.experts
    width = heads * config.head_dim
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer, gguf = f"model.layers.{index}", f"blk.{index}"
        yield from gqa.tensors(config, f"{layer}.self_attn", f"{gguf}.attn")
        gate = f"{layer}.self_attn.gate_proj"
        yield from linear(gate, (width, hidden), by_outputs((width, heads)), f"{gguf}.attn_gate")
        for name, place in _NORMS.items():
            yield norm(f"{layer}.{name}", hidden, f"{gguf}.{place}")
        if experts is not None and index in experts.layers:
            yield from moe.tensors(experts, hidden, layer, gguf, _NAMES)
        else:
            yield from mlp.tensors(config, f"{layer}.mlp", f"{gguf}.ffn")
    yield norm("model.norm", hidden, "output_norm")


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config)
    layers = [_layer(config, builder, index) for index in range(config.layers)]
    return Decoder(builder, config, vocab, layers, builder.norm("model.norm", config.norm_eps))


def _layer(config: ModelConfig, builder: LayerBuilder, index: int) -> Block:
    name, experts = f"model.layers.{index}", config.experts
    norms = Norms(*(builder.norm(f"{name}.{norm}", config.norm_eps) for norm in _NORMS))
    result = apart_gated(builder, config, f"{name}.self_attn", config.windows[index], "gate_proj")
    if experts is not None and index in experts.layers:
        return Block(builder, config, result, moe.SparseFeedForward(builder, experts, name, _NAMES), norms)
    return Block(builder, config, result, gated_mlp(builder, config, f"{name}.mlp"), norms)
