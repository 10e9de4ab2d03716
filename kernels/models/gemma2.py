"""Gemma 2 (Gemma Team, arXiv 2408.00118, section 2): norms stand before and after attention and feed-forward layers,
every other layer sees a sliding window, scores and logits are capped.

    h = embed(ids) * sqrt(hidden)
    for each layer:  h = h + norm(attention(norm(h)));  h = h + norm(mlp(norm(h)))
    logits = cap * tanh(head(norm(h)) / cap)

Norms are stored less one. The feed-forward layer's gate is GELU's (Shazeer, arXiv 2002.05202).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kernels.contract.caches import CacheGroup
from kernels.contract.errors import ConfigError
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, mlp, vocabulary
from kernels.models.layers.block import Block, Norms, attention, gated_mlp
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.weights.tensors import TensorSpec, norm

__all__ = ["build", "caches", "config", "tensors"]


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    if raw.flag("use_bidirectional_attention"):
        raise ConfigError("use_bidirectional_attention is for embeddings; use a model that generates text")
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    given = ConfigReader(caps | dict(raw.raw), raw.architecture)  # null: no cap
    bias, windows = raw.flag("attention_bias"), raw.patterned_windows(2)
    plain = raw.decoder(
        qkv_bias=bias, output_bias=bias, windows=windows, activation="gelu_tanh", head_dim=256, tied=True
    )
    return dataclasses.replace(
        plain,
        embedding_scale=plain.hidden_size**0.5,
        attention_scale=raw.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_softcap=given.number("attn_logit_softcapping", 0.0),
        logit_softcap=given.number("final_logit_softcapping", 0.0),
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
