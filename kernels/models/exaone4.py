"""EXAONE 4 (LG AI Research, arXiv 2507.11407): norms come after attention and feed-forward layers, as OLMo 2's; query
and key heads are normed. In the large model three of four layers see a sliding window, the fourth all tokens without
positions.

    h = h + norm(attention(h));  h = h + norm(mlp(h))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kernels.contract.caches import CacheGroup
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, mlp, vocabulary
from kernels.models.layers.block import Block, Norms, attention, gated_mlp
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.weights.tensors import TensorSpec, norm

__all__ = ["build", "caches", "config", "tensors"]


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    windows = raw.patterned_windows(4)
    plain = raw.decoder(qk_norm=True, windows=windows, eps=1e-5)
    nothing = dataclasses.replace(plain.rope, kind="none")
    hybrid = raw.raw.get("sliding_window", 0) is not None
    full = [layer for layer, window in enumerate(windows) if hybrid and not window]
    return dataclasses.replace(plain, ropes=dict.fromkeys(full, nothing))


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    hidden = config.hidden_size
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer, gguf = f"model.layers.{index}", f"blk.{index}"
        yield from gqa.tensors(config, f"{layer}.self_attn", f"{gguf}.attn")
        yield norm(f"{layer}.post_attention_layernorm", hidden, f"{gguf}.post_attention_norm")
        yield from mlp.tensors(config, f"{layer}.mlp", f"{gguf}.ffn")
        yield norm(f"{layer}.post_feedforward_layernorm", hidden, f"{gguf}.post_ffw_norm")
    yield norm("model.norm", hidden, "output_norm")


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """The caches of the layers."""
    return gqa.caches(config)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config)
    layers = [_layer(config, builder, f"model.layers.{index}", window) for index, window in enumerate(config.windows)]
    return Decoder(builder, config, vocab, layers, builder.norm("model.norm", config.norm_eps))


def _layer(config: ModelConfig, builder: LayerBuilder, name: str, window: int) -> Block:
    norms = Norms(
        after_attention=builder.norm(f"{name}.post_attention_layernorm", config.norm_eps),
        after_mlp=builder.norm(f"{name}.post_feedforward_layernorm", config.norm_eps),
    )
    result, feed_forward = (
        attention(builder, config, f"{name}.self_attn", window),
        gated_mlp(builder, config, f"{name}.mlp"),
    )
    return Block(builder, config, result, feed_forward, norms)
