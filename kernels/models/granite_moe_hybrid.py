"""Granite 4 (IBM, https://github.com/ibm-granite/granite-4.0-language-models): Granite's decoder and its multipliers,
in which most layers are Mamba 2, the others attention, often without positions. All have a gated feed-forward layer,
and most models experts beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import Tensor

from kernels.contract.caches import CacheGroup
from kernels.core.operators import Linear
from kernels.models import granite
from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, mamba, moe, pre_norm, recurrent, vocabulary
from kernels.models.layers.block import AttentionLayer, Block, Norms, attention
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.models.layers.mamba import Mamba
from kernels.models.layers.moe import ExpertNames
from kernels.weights.tensors import Role, TensorSpec, by_inputs, by_outputs, linear, norm

__all__ = ["EXPERTS", "build", "caches", "config", "tensors"]

EXPERTS = ExpertNames(
    "block_sparse_moe",
    "gate_proj",
    "up_proj",
    "down_proj",
    router="router.layer",
    both="block_sparse_moe.input_linear.weight",
    down_of_all="block_sparse_moe.output_linear.weight",
)
_KINDS = {"mamba": "mamba", "linear_attention": "mamba", "attention": "attention", "full_attention": "attention"}


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    experts = None
    if raw.raw.get("num_local_experts", 8):
        count, chosen = ConfigReader({"num_experts_per_tok": 2, **raw.raw}, raw.architecture).expert_counts()
        inner = raw.size("intermediate_size")
        experts = ExpertsConfig(frozenset(range(raw.layers)), count, chosen, inner, normalized=True)
    kinds = raw.layer_types(*_KINDS) or ("mamba",) * raw.layers
    shared = ConfigReader(
        {**raw.raw, "intermediate_size": raw.size("shared_intermediate_size", 1024)}, raw.architecture
    )
    plain = granite.config(shared)
    rope = plain.rope
    if raw.raw.get("position_embedding_type") != "rope":
        rope = dataclasses.replace(rope, kind="none")
    return dataclasses.replace(
        plain,
        rope=rope,
        experts=experts,
        recurrence=mamba.read(raw, raw.size("mamba_expand", 2) * plain.hidden_size),
        recurrent=frozenset(layer for layer, kind in enumerate(kinds) if _KINDS[kind] == "mamba"),
    )


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    hidden, inner = config.hidden_size, config.intermediate_size
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer = f"model.layers.{index}"
        yield from pre_norm.norm_tensors(config, layer, "")
        if index in config.recurrent:
            yield from mamba.tensors(config, f"{layer}.mamba")
        else:
            yield from gqa.tensors(config, f"{layer}.self_attn", "")
        if config.experts is not None:
            yield from moe.tensors(config.experts, hidden, layer, "", EXPERTS)
        both = by_outputs((inner, inner), (inner, inner))
        yield from linear(f"{layer}.shared_mlp.input_linear", (2 * inner, hidden), both)
        down = f"{layer}.shared_mlp.output_linear"
        yield from linear(down, (hidden, inner), by_inputs(inner, inner), role=Role.DOWN)
    yield norm("model.norm", hidden)


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """Keys and values of the layers with attention, states of the others."""
    return recurrent.with_attention(config, gqa.caches(config))


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config)
    layers = [_layer(config, builder, index) for index in range(config.layers)]
    return Decoder(builder, config, vocab, layers, builder.norm("model.norm", config.norm_eps))


def _layer(config: ModelConfig, builder: LayerBuilder, index: int) -> Block:
    name = f"model.layers.{index}"
    norms = Norms(
        before_attention=builder.norm(f"{name}.input_layernorm", config.norm_eps),
        before_mlp=builder.norm(f"{name}.post_attention_layernorm", config.norm_eps),
    )
    mixer: AttentionLayer
    if index in config.recurrent:
        mixer = Mamba(builder, config, f"{name}.mamba")
    else:
        mixer = attention(builder, config, f"{name}.self_attn", 0)
    return Block(builder, config, mixer, _feed_forward(config, builder, name), norms)


def _feed_forward(config: ModelConfig, builder: LayerBuilder, layer: str) -> Linear:
    """The layer that all tokens take, and the experts beside it."""
    gate_up = builder.gated(f"{layer}.shared_mlp.input_linear")
    down = builder.row_parallel(f"{layer}.shared_mlp.output_linear")
    if config.experts is None:
        return lambda x: down(gate_up(x))
    experts = moe.SparseFeedForward(builder, config.experts, layer, EXPERTS)

    def both(x: Tensor) -> Tensor:
        return experts(x) + down(gate_up(x))

    return both
