"""Gemma 3, its language model (Gemma Team, arXiv 2503.19786, section 2): Gemma 2's decoder without caps, with norms of
query and key heads. Five of six layers see a sliding window and rotate with a base of their own.
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
    bias, windows = raw.flag("attention_bias"), raw.patterned_windows(6)
    plain = raw.decoder(
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        windows=windows,
        activation="gelu_tanh",
        head_dim=256,
        tied=True,
        theta=1000000.0,
    )
    local = raw.local_rope(plain.head_dim, 10000.0)
    return dataclasses.replace(
        plain,
        ropes={layer: local for layer, window in enumerate(windows) if window},
        embedding_scale=plain.hidden_size**0.5,
        attention_scale=raw.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_softcap=raw.number("attn_logit_softcapping", 0.0),
        logit_softcap=raw.number("final_logit_softcapping", 0.0),
        norm_offset=0.0 if raw.flag("whole_norms") else 1.0,
    )


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    hidden = config.hidden_size
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer, gguf = f"model.layers.{index}", f"blk.{index}"
        yield from gqa.tensors(config, f"{layer}.self_attn", f"{gguf}.attn")
        yield from mlp.tensors(config, f"{layer}.mlp", f"{gguf}.ffn")
        for name, place in _NORMS.items():
            yield norm(f"{layer}.{name}", hidden, f"{gguf}.{place}")
    yield norm("model.norm", hidden, "output_norm")


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """The caches of the layers."""
    return gqa.caches(config)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config)
    layers = [_layer(config, builder, f"model.layers.{index}", window) for index, window in enumerate(config.windows)]
    return Decoder(builder, config, vocab, layers, builder.norm("model.norm", config.norm_eps, config.norm_offset))


_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""The norms before and after attention, before and after the feed-forward layer, with their names in GGUF files."""


def _layer(config: ModelConfig, builder: LayerBuilder, name: str, window: int) -> Block:
    norms = Norms(*(builder.norm(f"{name}.{norm}", config.norm_eps, config.norm_offset) for norm in _NORMS))
    feed_forward = gated_mlp(builder, config, f"{name}.mlp")
    return Block(builder, config, attention(builder, config, f"{name}.self_attn", window), feed_forward, norms)
