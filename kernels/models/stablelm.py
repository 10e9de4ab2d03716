"""StableLM 2 (Bellagente et al., arXiv 2402.17834): Llama's decoder with layer norms and a rotation of the first
quarter of each head. The larger models norm each query and key head and add attention and feed-forward layer together.
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
from kernels.weights.tensors import TensorSpec, biased_norm, norm

__all__ = ["build", "caches", "config", "tensors"]


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    plain = raw.decoder(
        qkv_bias=raw.flag("use_qkv_bias"),
        qk_norm=raw.flag("qk_layernorm"),
        norm_eps="layer_norm_eps",
        eps=1e-5,
        rotary=0.25,
    )
    return dataclasses.replace(plain, parallel_residual=raw.flag("use_parallel_residual"))


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    hidden, heads, kv_heads, dim = config.hidden_size, config.heads, config.kv_heads, config.head_dim
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer, gguf = f"model.layers.{index}", f"blk.{index}"
        yield from biased_norm(f"{layer}.input_layernorm", hidden, f"{gguf}.attn_norm")
        yield from gqa.tensors(dataclasses.replace(config, qk_norm=False), f"{layer}.self_attn", f"{gguf}.attn")
        if config.qk_norm:
            for part, count in (("q_layernorm", heads), ("k_layernorm", kv_heads)):
                for head in range(count):
                    yield norm(f"{layer}.self_attn.{part}.norms.{head}", dim)
        if not config.parallel_residual:
            yield from biased_norm(f"{layer}.post_attention_layernorm", hidden, f"{gguf}.ffn_norm")
        yield from mlp.tensors(config, f"{layer}.mlp", f"{gguf}.ffn")
    yield from biased_norm("model.norm", hidden, "output_norm")


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
        names = [f"{module}.{part}.norms.{head}" for part, head in _own_heads(config, builder)]
        heads = builder.layer_norm(*names, eps=config.norm_eps, order=gqa.head_order(config))
    norms = Norms(
        before_attention=builder.layer_norm(f"{name}.input_layernorm", eps=config.norm_eps),
        before_mlp=None
        if config.parallel_residual
        else builder.layer_norm(f"{name}.post_attention_layernorm", eps=config.norm_eps),
    )
    result, feed_forward = attention(builder, config, module, window, heads), gated_mlp(builder, config, f"{name}.mlp")
    return Block(builder, config, result, feed_forward, norms, config.parallel_residual)


def _own_heads(config: ModelConfig, builder: LayerBuilder) -> Iterator[tuple[str, int]]:
    """The query and key heads of this rank, as the checkpoint names and counts them; ranks may share a key head."""
    rank = builder.mesh.rank
    first = rank * (config.global_kv_heads or config.kv_heads) // builder.mesh.size
    yield from (("q_layernorm", rank * config.heads + head) for head in range(config.heads))
    yield from (("k_layernorm", first + head) for head in range(config.kv_heads))
