"""Qwen1.5-MoE and Qwen2-MoE (https://huggingface.co/Qwen/Qwen1.5-MoE-A2.7B): Qwen2's decoder with layers of experts,
of which one is taken by all tokens, weighted by the sigmoid of a logit of its own (``shared_expert_gate``).
"""

from __future__ import annotations

from collections.abc import Iterator

from kernels.contract.caches import CacheGroup
from kernels.devices.linear import NormThenLinear
from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, mlp, moe, pre_norm, vocabulary
from kernels.models.layers.builder import ModelBuilder
from kernels.models.layers.mlp import FeedForward
from kernels.models.layers.pre_norm import PreNormLayer
from kernels.weights.tensors import TensorSpec, norm

__all__ = ["build", "caches", "config", "tensors"]


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    windows, sparse = raw.switched_windows(even=True), raw.sparse_layers()
    count, chosen = raw.expert_counts()
    shared, normalized = raw.size("shared_expert_intermediate_size"), raw.flag("norm_topk_prob")
    experts = ExpertsConfig(sparse, count, chosen, raw.size("moe_intermediate_size"), normalized, shared)
    bias = raw.flag("qkv_bias", True) or raw.flag("attention_bias")
    return raw.decoder(qkv_bias=bias, windows=windows, experts=experts)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    experts = config.experts
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer, gguf = f"model.layers.{index}", f"blk.{index}"
        yield from pre_norm.norm_tensors(config, layer, gguf)
        yield from gqa.tensors(config, f"{layer}.self_attn", f"{gguf}.attn")
        if experts is not None and index in experts.layers:
            yield from moe.tensors(experts, config.hidden_size, layer, gguf)
        else:
            yield from mlp.tensors(config, f"{layer}.mlp", f"{gguf}.ffn")
    yield norm("model.norm", config.hidden_size, "output_norm")


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """The caches of the layers."""
    return gqa.caches(config)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config)
    layers = [_layer(config, builder, index) for index in range(config.layers)]
    return Decoder(builder, config, vocab, layers, builder.norm("model.norm", config.norm_eps))


def _layer(config: ModelConfig, builder: ModelBuilder, index: int) -> PreNormLayer:
    name, experts = f"model.layers.{index}", config.experts
    first = builder.norm(f"{name}.input_layernorm", config.norm_eps)
    attention = gqa.attention(builder, config, f"{name}.self_attn", config.windows[index])
    second = builder.norm(f"{name}.post_attention_layernorm", config.norm_eps)
    feed_forward: FeedForward | NormThenLinear
    if experts is not None and index in experts.layers:
        feed_forward = NormThenLinear(second, moe.SparseFeedForward(builder, experts, name))
    else:
        feed_forward = mlp.feed_forward(builder, second, f"{name}.mlp")
    return PreNormLayer(builder, first, attention, second, feed_forward)
