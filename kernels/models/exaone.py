"""EXAONE 3 and 3.5 (LG AI Research, arXiv 2408.03541 and 2412.04862): Llama's decoder under names of its own."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.contract.caches import CacheGroup
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, vocabulary
from kernels.models.layers.builder import ModelBuilder
from kernels.models.layers.gqa import Attention, Heads
from kernels.models.layers.mlp import FeedForward
from kernels.models.layers.pre_norm import PreNormLayer
from kernels.weights.tensors import Role, TensorSpec, by_inputs, by_outputs, linear, norm

__all__ = ["build", "caches", "config", "tensors"]


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    names = {
        "num_layers": "num_hidden_layers",
        "layer_norm_epsilon": "rms_norm_eps",
        "activation_function": "hidden_act",
    }
    renamed = {names.get(key, key): value for key, value in raw.raw.items()}
    return ConfigReader(renamed, raw.architecture).decoder(eps=1e-5)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    hidden, inner, heads, kv_heads = config.hidden_size, config.intermediate_size, config.heads, config.kv_heads
    queries, keys = heads * config.head_dim, kv_heads * config.head_dim
    by_head, by_key_head, by_inner = (by_outputs(part) for part in ((queries, heads), (keys, kv_heads), (inner, inner)))
    yield from vocabulary.tensors(config, "transformer.wte")
    for index in range(config.layers):
        layer, gguf = f"transformer.h.{index}", f"blk.{index}"
        attention, feed_forward = f"{layer}.attn.attention", f"{layer}.mlp"
        yield norm(f"{layer}.ln_1", hidden, f"{gguf}.attn_norm")
        yield from linear(f"{attention}.q_proj", (queries, hidden), by_head, f"{gguf}.attn_q")
        yield from linear(f"{attention}.k_proj", (keys, hidden), by_key_head, f"{gguf}.attn_k")
        yield from linear(f"{attention}.v_proj", (keys, hidden), by_key_head, f"{gguf}.attn_v")
        yield from linear(f"{attention}.out_proj", (hidden, queries), by_inputs(queries, heads), f"{gguf}.attn_output")
        yield norm(f"{layer}.ln_2", hidden, f"{gguf}.ffn_norm")
        yield from linear(f"{feed_forward}.c_fc_0", (inner, hidden), by_inner, f"{gguf}.ffn_gate")
        yield from linear(f"{feed_forward}.c_fc_1", (inner, hidden), by_inner, f"{gguf}.ffn_up")
        down = f"{feed_forward}.c_proj"
        yield from linear(down, (hidden, inner), by_inputs(inner, inner), f"{gguf}.ffn_down", role=Role.DOWN)
    yield norm("transformer.ln_f", hidden, "output_norm")


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """The caches of the layers."""
    return gqa.caches(config)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config, "transformer.wte")
    layers = [_layer(config, builder, f"transformer.h.{index}", window) for index, window in enumerate(config.windows)]
    return Decoder(builder, config, vocab, layers, builder.norm("transformer.ln_f", config.norm_eps))


def _layer(config: ModelConfig, builder: ModelBuilder, name: str, window: int) -> PreNormLayer:
    attention, feed_forward = f"{name}.attn.attention", f"{name}.mlp"
    heads = Heads(config.heads, config.kv_heads, config.head_dim)
    qkv = builder.linear(*(f"{attention}.{part}_proj" for part in "qkv"))
    result = Attention(builder, heads, qkv, builder.into_stream(f"{attention}.out_proj"), window)
    first, second = (builder.norm(f"{name}.{norm}", config.norm_eps) for norm in ("ln_1", "ln_2"))
    gate_up = builder.gated(f"{feed_forward}.c_fc_0", f"{feed_forward}.c_fc_1")
    down = builder.into_stream(f"{feed_forward}.c_proj")
    return PreNormLayer(builder, first, result, second, FeedForward(builder, second, gate_up, down))
