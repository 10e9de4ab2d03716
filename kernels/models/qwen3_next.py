"""Qwen3-Next (https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct): three of four layers are gated delta nets, the
others gated attention; all have experts, and one that all tokens take.

Checkpoints hold a further layer for the token after the next, ``mtp`` (kernels.speculation.drafters.mtp).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kernels.contract.caches import CacheGroup
from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import delta_net, gated_attention, gqa, recurrent, sparse
from kernels.models.layers.block import AttentionLayer
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.models.layers.gated_attention import GatedAttention
from kernels.weights.tensors import TensorSpec

__all__ = ["build", "caches", "config", "decoder", "mixer", "mixer_tensors", "tensors"]


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    count, chosen = raw.expert_counts()
    experts = ExpertsConfig(
        raw.sparse_layers(),
        count,
        chosen,
        raw.size("moe_intermediate_size", 512),
        raw.flag("norm_topk_prob", True),
        raw.size("shared_expert_intermediate_size", 512),
    )
    return decoder(raw, experts, grouped=True)


def decoder(raw: ConfigReader, experts: ExpertsConfig | None, grouped: bool) -> ModelConfig:
    """The sizes that such decoders share. ``grouped``: as ``DeltaConfig``."""
    every, bias = raw.size("full_attention_interval", 4), raw.flag("attention_bias")
    kinds = raw.layer_types("linear_attention", "full_attention") or tuple(
        "linear_attention" if (layer + 1) % every else "full_attention" for layer in range(raw.layers)
    )
    plain = raw.decoder(qkv_bias=bias, output_bias=bias, qk_norm=True, experts=experts, head_dim=256, rotary=0.25)
    return dataclasses.replace(
        plain,
        norm_offset=0.0 if raw.flag("whole_norms") else 1.0,
        recurrence=delta_net.read(raw, grouped),
        recurrent=frozenset(layer for layer, kind in enumerate(kinds) if kind == "linear_attention"),
    )


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    return sparse.mixed_tensors(config, mixer_tensors, second="post_attention_norm")


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """Keys and values of the layers with attention, states of the others."""
    return recurrent.with_attention(config, gqa.caches(config))


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    return sparse.build_mixed(config, builder, mixer)


def mixer_tensors(config: ModelConfig, index: int) -> Iterator[TensorSpec]:
    """What stands in the place of attention in the layer of this number."""
    layer = f"model.layers.{index}"
    if index in config.recurrent:
        return delta_net.tensors(config, f"{layer}.linear_attn", f"blk.{index}")
    return gated_attention.tensors(config, f"{layer}.self_attn", f"blk.{index}.attn")


def mixer(builder: LayerBuilder, config: ModelConfig, index: int) -> AttentionLayer:
    """The layer of ``mixer_tensors``."""
    layer = f"model.layers.{index}"
    if index in config.recurrent:
        return delta_net.layer(builder, config, f"{layer}.linear_attn")
    return GatedAttention(builder, config, f"{layer}.self_attn")
