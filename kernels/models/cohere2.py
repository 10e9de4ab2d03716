"""Command R7B and Command A (Team Cohere, arXiv 2504.00698): Command R's decoder, of which three of four layers see a
sliding window. The fourth sees all tokens and has no positions.
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
    bias, windows = raw.flag("attention_bias"), raw.patterned_windows(4)
    plain = raw.decoder(
        qkv_bias=bias, output_bias=bias, windows=windows, norm_eps="layer_norm_eps", eps=1e-5, tied=True
    )
    nothing = dataclasses.replace(plain.rope, kind="none")
    return dataclasses.replace(
        plain,
        rope_interleaved=True,
        ropes={layer: nothing for layer, window in enumerate(windows) if not window},
        logit_scale=raw.number("logit_scale", 0.0625),
    )


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    hidden = config.hidden_size
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer, gguf = f"model.layers.{index}", f"blk.{index}"
        yield norm(f"{layer}.input_layernorm", hidden, f"{gguf}.attn_norm")
        yield from gqa.tensors(config, f"{layer}.self_attn", f"{gguf}.attn")
        yield from mlp.tensors(config, f"{layer}.mlp", f"{gguf}.ffn")
    yield norm("model.norm", hidden, "output_norm")


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """The caches of the layers."""
    return gqa.caches(config)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config)
    layers = [_layer(config, builder, f"model.layers.{index}", window) for index, window in enumerate(config.windows)]
    return Decoder(builder, config, vocab, layers, builder.layer_norm("model.norm", eps=config.norm_eps))


def _layer(config: ModelConfig, builder: LayerBuilder, name: str, window: int) -> Block:
    norms = Norms(before_attention=builder.layer_norm(f"{name}.input_layernorm", eps=config.norm_eps))
    result = attention(builder, config, f"{name}.self_attn", window)
    return Block(builder, config, result, gated_mlp(builder, config, f"{name}.mlp"), norms, parallel_residual=True)
