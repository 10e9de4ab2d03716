"""Baichuan and Baichuan 2 (Yang et al., arXiv 2309.10305): Llama's decoder with one projection of queries, keys and
values. The larger models have no rotation: distances of tokens are taken off their scores (ALiBi, Press et al., arXiv
2108.12409). Rows of Baichuan 2's output have a length of one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, mlp, pre_norm, vocabulary
from kernels.models.layers.block import Block, Norms, SelfAttention, gated_mlp
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.weights.tensors import TensorSpec, by_inputs, by_outputs, linear

__all__ = ["build", "caches", "config", "tensors"]

_FIRST_VOCAB = 64000  # rows of the table of Baichuan's first models, whose output is not normed

caches = gqa.caches


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json. Models without rotation have ``model_max_length`` in place of
    ``max_position_embeddings``."""
    alibi = raw.raw.get("max_position_embeddings") is None
    length = {"max_position_embeddings": raw.size("model_max_length", 4096)} if alibi else {}
    plain = ConfigReader({**raw.raw, **length}, raw.architecture).decoder()
    head_norm = "" if plain.vocab_size == _FIRST_VOCAB or plain.tied_embeddings else "rows"
    rope = dataclasses.replace(plain.rope, kind="none") if alibi else plain.rope
    apart = raw.flag("qkv_apart")
    return dataclasses.replace(plain, rope=rope, alibi=alibi, head_norm=head_norm, qkv_apart=apart)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    hidden, heads = config.hidden_size, config.heads
    width = heads * config.head_dim
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer, gguf = f"model.layers.{index}", f"blk.{index}"
        yield from pre_norm.norm_tensors(config, layer, gguf)
        if config.qkv_apart:
            yield from gqa.interleaved_tensors(config, f"{layer}.self_attn", f"{gguf}.attn")
        else:
            parts = by_outputs(*[(width, heads)] * 3)
            yield from linear(f"{layer}.self_attn.W_pack", (3 * width, hidden), parts)
            yield from linear(f"{layer}.self_attn.o_proj", (hidden, width), by_inputs(width, heads))
        yield from mlp.tensors(config, f"{layer}.mlp", f"{gguf}.ffn")
    yield from pre_norm.stream_norm(config, "model.norm", "output_norm")


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config)
    layers = [_layer(config, builder, f"model.layers.{index}") for index in range(config.layers)]
    return Decoder(builder, config, vocab, layers, builder.norm("model.norm", config.norm_eps))


def _layer(config: ModelConfig, builder: LayerBuilder, name: str) -> Block:
    norms = Norms(
        before_attention=builder.norm(f"{name}.input_layernorm", config.norm_eps),
        before_mlp=builder.norm(f"{name}.post_attention_layernorm", config.norm_eps),
    )
    module = f"{name}.self_attn"
    parts = [f"{module}.{part}_proj" for part in "qkv"] if config.qkv_apart else [f"{module}.W_pack"]
    qkv, output = builder.linear(*parts), builder.row_parallel(f"{module}.o_proj")
    attention = SelfAttention(builder, config, qkv, output, 0)
    return Block(builder, config, attention, gated_mlp(builder, config, f"{name}.mlp"), norms)
