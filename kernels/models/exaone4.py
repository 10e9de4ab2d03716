"""EXAONE 4 (LG AI Research, arXiv 2507.11407): norms come after attention and feed-forward layers, as OLMo 2's; query
and key heads are normed. In the large model three of four layers see a sliding window, the fourth all tokens without
positions.

    h = h + norm(attention(h));  h = h + norm(mlp(h))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from kernels.contract.caches import CacheGroup
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, mlp, vocabulary
from kernels.models.layers.block import Block, Norms, attention, gated_mlp
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.weights.tensors import TensorSpec, norm

__all__ = ["build", "caches", "config", "head_config", "head_layer", "head_tensors", "tensors"]


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
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        yield from _layer_tensors(config, f"model.layers.{index}", f"blk.{index}")
    yield norm("model.norm", config.hidden_size, "output_norm")


def _layer_tensors(config: ModelConfig, layer: str, gguf: str) -> Iterator[TensorSpec]:
    hidden = config.hidden_size
    yield from gqa.tensors(config, f"{layer}.self_attn", f"{gguf}.attn")
    yield norm(f"{layer}.post_attention_layernorm", hidden, f"{gguf}.post_attention_norm")
    yield from mlp.tensors(config, f"{layer}.mlp", f"{gguf}.ffn")
    yield norm(f"{layer}.post_feedforward_layernorm", hidden, f"{gguf}.post_ffw_norm")


def head_config(raw: Mapping[str, Any], target: ModelConfig, name: str) -> ModelConfig:
    """The sizes of a head for later tokens, which is as the target's first layer; ``mtp_layer_types`` may say that it
    has no window, then it rotates no heads unless all layers do."""
    kinds, window, rope = raw.get("mtp_layer_types"), target.windows[0], target.ropes.get(0, target.rope)
    if isinstance(kinds, list) and kinds[:1] == ["full_attention"]:
        full = next((layer for layer, other in enumerate(target.windows) if not other), None)
        window, rope = 0, rope if full is None else target.ropes.get(full, target.rope)
    return dataclasses.replace(target, layers=1, windows=(window,), experts=None, rope=rope, ropes={})


def head_tensors(config: ModelConfig, name: str) -> Iterator[TensorSpec]:
    """The tensors of the layer of a head for later tokens."""
    return _layer_tensors(config, name, "")


def head_layer(config: ModelConfig, builder: LayerBuilder, name: str) -> Block:
    """The layer of ``head_tensors``, on one rank."""
    return _layer(config, builder, name, config.windows[0])


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
