"""Command R (https://docs.cohere.com/docs/command-r): attention and the feed-forward layer read the same layer norm and
are added together; neighbors of a head rotate against one another.

    n = norm(h);  h = h + attention(n) + mlp(n)

Command R+ norms queries and keys, each head with a weight of its own.
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
from kernels.weights.tensors import GgufPlace, Role, TensorSpec, by_outputs, norm

__all__ = ["build", "caches", "config", "tensors"]


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    bias = raw.flag("attention_bias")
    plain = raw.decoder(
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=raw.flag("use_qk_norm"),
        norm_eps="layer_norm_eps",
        eps=1e-5,
        theta=500000.0,
        tied=True,
    )
    return dataclasses.replace(plain, rope_interleaved=True, logit_scale=raw.number("logit_scale", 0.0625))


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    hidden, heads, kv_heads, dim = config.hidden_size, config.heads, config.kv_heads, config.head_dim
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer, gguf = f"model.layers.{index}", f"blk.{index}"
        yield norm(f"{layer}.input_layernorm", hidden, f"{gguf}.attn_norm")
        yield from gqa.tensors(dataclasses.replace(config, qk_norm=False), f"{layer}.self_attn", f"{gguf}.attn")
        if config.qk_norm:
            for name, count in (("q_norm", heads), ("k_norm", kv_heads)):
                split = by_outputs((count, count))
                place = GgufPlace(f"{gguf}.attn_{name}.weight")
                yield TensorSpec(f"{layer}.self_attn.{name}.weight", (count, dim), Role.NORM, split, place)
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
    heads, module = None, f"{name}.self_attn"
    if config.qk_norm:
        names = [f"{module}.q_norm", f"{module}.k_norm"]
        heads = builder.layer_norm(*names, eps=config.norm_eps, order=gqa.head_order(config))
    norms = Norms(before_attention=builder.layer_norm(f"{name}.input_layernorm", eps=config.norm_eps))
    result, feed_forward = attention(builder, config, module, window, heads), gated_mlp(builder, config, f"{name}.mlp")
    return Block(builder, config, result, feed_forward, norms, parallel_residual=True)
