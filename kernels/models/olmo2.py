"""OLMo 2 (OLMo Team, arXiv 2501.00656, section 2.1): norms come after attention and feed-forward layers.

    h = embed(ids)
    for each layer:  h = h + norm(attention(h));  h = h + norm(mlp(h))
    logits = head(norm(h))

Queries and keys are normed before they are rotated, each over the width of all heads.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernels.contract.caches import CacheGroup
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, mlp, vocabulary
from kernels.models.layers.block import Block, Norms, gated_mlp, wide_attention
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.weights.tensors import TensorSpec, norm

__all__ = ["build", "caches", "config", "tensors"]


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    bias = raw.flag("attention_bias")
    return raw.decoder(qkv_bias=bias, output_bias=bias, eps=1e-5)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    hidden = config.hidden_size
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer, gguf = f"model.layers.{index}", f"blk.{index}"
        yield from gqa.wide_tensors(config, f"{layer}.self_attn", f"{gguf}.attn")
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
    result = wide_attention(builder, config, f"{name}.self_attn", window)
    return Block(builder, config, result, gated_mlp(builder, config, f"{name}.mlp"), norms)
