"""Mixtral (Jiang et al., arXiv 2401.04088): Mistral's decoder, whose feed-forward layers are all experts.

The weights of the experts that a token takes add up to one. Checkpoints call an expert's projections ``w1`` (gate),
``w3`` (up) and ``w2`` (down). GGUF files call the architecture llama, with experts.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernels.contract.caches import CacheGroup
from kernels.devices.linear import NormThenLinear
from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, moe, pre_norm, vocabulary
from kernels.models.layers.builder import ModelBuilder
from kernels.models.layers.moe import ExpertNames
from kernels.models.layers.pre_norm import PreNormLayer
from kernels.weights.tensors import TensorSpec, norm

__all__ = ["build", "caches", "config", "tensors"]

NAMES = ExpertNames("block_sparse_moe", "w1", "w3", "w2")


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    bias, windows = raw.flag("attention_bias"), raw.windows()
    count, chosen = raw.expert_counts()
    everywhere = frozenset(range(raw.layers))
    experts = ExpertsConfig(everywhere, count, chosen, raw.size("intermediate_size"), normalized=True)
    return raw.decoder(qkv_bias=bias, output_bias=bias, windows=windows, experts=experts)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    assert config.experts is not None
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer, gguf = f"model.layers.{index}", f"blk.{index}"
        yield from pre_norm.norm_tensors(config, layer, gguf)
        yield from gqa.tensors(config, f"{layer}.self_attn", f"{gguf}.attn", interleaved=True)
        yield from moe.tensors(config.experts, config.hidden_size, layer, gguf, NAMES)
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
    assert config.experts is not None
    name = f"model.layers.{index}"
    first = builder.norm(f"{name}.input_layernorm", config.norm_eps)
    attention = gqa.attention(builder, config, f"{name}.self_attn", config.windows[index])
    second = builder.norm(f"{name}.post_attention_layernorm", config.norm_eps)
    experts = moe.SparseFeedForward(builder, config.experts, name, NAMES)
    return PreNormLayer(builder, first, attention, second, NormThenLinear(second, experts))
