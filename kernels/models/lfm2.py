"""LFM2 (Liquid AI, arXiv 2511.23404): most layers are gated short convolutions, the others attention; all have a gated
feed-forward layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kernels.contract.caches import CacheGroup
from kernels.contract.errors import ConfigError
from kernels.core.operators import Linear
from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, moe, recurrent, short_convolution, vocabulary
from kernels.models.layers.block import AttentionLayer, Block, Norms, SelfAttention
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.models.layers.moe import ExpertNames
from kernels.models.layers.short_convolution import ConvolutionConfig, ShortConvolution
from kernels.weights.tensors import Role, TensorSpec, by_inputs, by_outputs, linear, norm

__all__ = ["build", "caches", "config", "decoder", "feed_forward", "feed_forward_tensors", "tensors"]

_RENAMED = {"o_proj": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}
_EXPERTS = ExpertNames(
    "feed_forward",
    "w1",
    "w3",
    "w2",
    correction="expert_bias",
    both="feed_forward.experts.gate_up_proj",
    down_of_all="feed_forward.experts.down_proj",
)


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    inner = raw.size("block_ff_dim" if raw.raw.get("block_ff_dim") is not None else "intermediate_size")
    if raw.flag("block_auto_adjust_ff_dim", True):
        factor, multiple = raw.number("block_ffn_dim_multiplier", 1.0), raw.size("block_multiple_of", 256)
        inner = multiple * -(-int(factor * int(2 * inner / 3)) // multiple)
    return decoder(ConfigReader({**raw.raw, "intermediate_size": inner}, raw.architecture), None)


def decoder(raw: ConfigReader, experts: ExpertsConfig | None) -> ModelConfig:
    """The sizes that the family's models share."""
    kinds = raw.layer_types("conv", "full_attention")
    if not kinds:
        given = raw.raw.get("full_attn_idxs")
        layers = range(raw.layers) if given is None else given
        if not isinstance(layers, list | range) or not all(type(layer) is int for layer in layers):
            raise ConfigError(f"config.json: full_attn_idxs must be a list of layers, and is {given!r}")
        kinds = tuple("full_attention" if layer in layers else "conv" for layer in range(raw.layers))
    tied = raw.flag("tie_embedding", True)
    plain = raw.decoder(qk_norm=True, experts=experts, norm_eps="norm_eps", eps=1e-5, theta=1e6, tied=tied)
    return dataclasses.replace(
        plain,
        layer_norms=False,
        recurrence=ConvolutionConfig(plain.hidden_size, raw.size("conv_L_cache", 3), raw.flag("conv_bias")),
        recurrent=frozenset(layer for layer, kind in enumerate(kinds) if kind == "conv"),
    )


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    hidden, experts = config.hidden_size, config.experts
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer, gguf = f"model.layers.{index}", f"blk.{index}"
        yield norm(f"{layer}.operator_norm", hidden, f"{gguf}.attn_norm")
        if index in config.recurrent:
            yield from short_convolution.tensors(config, f"{layer}.conv", f"{gguf}.shortconv")
        else:
            yield from _attention_tensors(config, f"{layer}.self_attn", f"{gguf}.attn")
        yield norm(f"{layer}.ffn_norm", hidden, f"{gguf}.ffn_norm")
        if experts is not None and index in experts.layers:
            yield from moe.tensors(experts, hidden, layer, gguf, _EXPERTS)
        else:
            yield from feed_forward_tensors(config, f"{layer}.feed_forward", f"{gguf}.ffn")
    yield norm("model.embedding_norm", hidden, "token_embd_norm")


def _attention_tensors(config: ModelConfig, module: str, gguf: str) -> Iterator[TensorSpec]:
    for spec in gqa.tensors(config, module, gguf):
        part, _, ending = spec.name.removeprefix(f"{module}.").partition(".")
        yield dataclasses.replace(spec, name=f"{module}.{_RENAMED.get(part, part)}.{ending}")


def feed_forward_tensors(config: ModelConfig, module: str, gguf: str) -> Iterator[TensorSpec]:
    """``w2(silu(w1(x)) * w3(x))``. ``gguf``: what their names begin with there."""
    hidden, inner = config.hidden_size, config.intermediate_size
    for name, place in (("w1", "gate"), ("w3", "up")):
        yield from linear(f"{module}.{name}", (inner, hidden), by_outputs((inner, inner)), f"{gguf}_{place}")
    yield from linear(f"{module}.w2", (hidden, inner), by_inputs(inner, inner), f"{gguf}_down", role=Role.DOWN)


def feed_forward(builder: LayerBuilder, module: str) -> Linear:
    """The layer of ``feed_forward_tensors``."""
    gate_up, down = builder.gated(f"{module}.w1", f"{module}.w3"), builder.row_parallel(f"{module}.w2")
    return lambda x: down(gate_up(x))


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """Keys and values of the layers with attention, inputs of the others' convolutions."""
    return recurrent.with_attention(config, gqa.caches(config))


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config)
    layers = [_layer(config, builder, index) for index in range(config.layers)]
    return Decoder(builder, config, vocab, layers, builder.norm("model.embedding_norm", config.norm_eps))


def _layer(config: ModelConfig, builder: LayerBuilder, index: int) -> Block:
    name, experts = f"model.layers.{index}", config.experts
    norms = Norms(
        before_attention=builder.norm(f"{name}.operator_norm", config.norm_eps),
        before_mlp=builder.norm(f"{name}.ffn_norm", config.norm_eps),
    )
    mixer: AttentionLayer
    if index in config.recurrent:
        mixer = ShortConvolution(builder, config, f"{name}.conv")
    else:
        mixer = _attention(config, builder, f"{name}.self_attn")
    if experts is not None and index in experts.layers:
        return Block(builder, config, mixer, moe.SparseFeedForward(builder, experts, name, _EXPERTS), norms)
    return Block(builder, config, mixer, feed_forward(builder, f"{name}.feed_forward"), norms)


def _attention(config: ModelConfig, builder: LayerBuilder, module: str) -> SelfAttention:
    names, counts = (f"{module}.q_layernorm", f"{module}.k_layernorm"), (config.heads, config.kv_heads)
    norm = builder.head_norms(*names, *counts, config.norm_eps, order=gqa.head_order(config))
    qkv = gqa.projection(builder, config, f"{module}.q_proj", f"{module}.k_proj", f"{module}.v_proj")
    return SelfAttention(builder, config, qkv, builder.row_parallel(f"{module}.out_proj"), 0, norm=norm)
