"""A decoder whose layers have a norm before attention and before the feed-forward layer, which is of experts in some.

h = h + attention(norm(h));  h = h + experts(norm(h))
parallel:  n = norm(h);  h = h + attention(n) + experts(n)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from kernels.core.operators import Linear, Norm
from kernels.devices.linear import NormThenLinear
from kernels.distributed.group import Group
from kernels.models.config import ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, mlp, moe, pre_norm, vocabulary
from kernels.models.layers.block import AttentionLayer, Block, Norms, gated_mlp
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.models.layers.mlp import FeedForward
from kernels.models.layers.moe import QWEN, ExpertNames
from kernels.models.layers.pre_norm import PreNormLayer
from kernels.weights.tensors import TensorSpec

__all__ = ["build", "build_mixed", "dense_builder", "mixed_tensors", "tensors"]

AttentionTensors = Callable[[ModelConfig, str, str], Iterator[TensorSpec]]
MakeAttention = Callable[[LayerBuilder, ModelConfig, str, int], AttentionLayer]
MixerTensors = Callable[[ModelConfig, int], Iterator[TensorSpec]]
MakeMixer = Callable[[LayerBuilder, ModelConfig, int], AttentionLayer]


def tensors(
    config: ModelConfig,
    names: ExpertNames = QWEN,
    attention: AttentionTensors = gqa.tensors,
    second: str = "ffn_norm",
) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint. ``attention``: of a layer's, by its names here and in GGUF. ``second``: as
    ``pre_norm.norm_tensors``."""
    return mixed_tensors(
        config,
        lambda config, index: attention(config, f"model.layers.{index}.self_attn", f"blk.{index}.attn"),
        names,
        second=second,
    )


def mixed_tensors(
    config: ModelConfig,
    mixer: MixerTensors,
    names: ExpertNames = QWEN,
    second: str = "ffn_norm",
) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint. ``mixer``: of what stands in the place of attention, by the layer's number.
    ``second``: as ``pre_norm.norm_tensors``."""
    experts = config.experts
    yield from vocabulary.tensors(config, "model.embed_tokens")
    for index in range(config.layers):
        layer, gguf = f"model.layers.{index}", f"blk.{index}"
        yield from pre_norm.norm_tensors(config, layer, gguf, second)
        yield from mixer(config, index)
        if experts is not None and index in experts.layers:
            yield from moe.tensors(experts, config.hidden_size, layer, gguf, names)
        else:
            for spec in mlp.tensors(config, f"{layer}.mlp", f"{gguf}.ffn"):
                yield dataclasses.replace(spec, split=None) if config.whole_dense else spec
    yield from pre_norm.stream_norm(config, "model.norm", "output_norm")


def build(
    config: ModelConfig, builder: ModelBuilder, names: ExpertNames = QWEN, attention: MakeAttention | None = None
) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``. ``attention``: makes that of a layer, by its name and its
    window; None: grouped-query attention, which devices fuse with the norm before it."""
    if attention is not None:
        make = attention
        return build_mixed(
            config,
            builder,
            lambda builder, config, index: make(
                builder, config, f"model.layers.{index}.self_attn", config.windows[index]
            ),
            names,
        )
    vocab = vocabulary.vocabulary(builder, config)
    layers = [_pre_norm_layer(config, builder, index, names) for index in range(config.layers)]
    return Decoder(builder, config, vocab, layers, _norm(config, builder, "model.norm"))


def _norm(config: ModelConfig, builder: LayerBuilder, module: str) -> Norm:
    """A norm of the residual stream."""
    if config.layer_norms:
        return builder.layer_norm(module, eps=config.norm_eps)
    return builder.norm(module, config.norm_eps, config.norm_offset)


def build_mixed(config: ModelConfig, builder: ModelBuilder, mixer: MakeMixer, names: ExpertNames = QWEN) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``. ``mixer``: makes what stands in the place of attention in a
    layer, by its number."""
    vocab = vocabulary.vocabulary(builder, config, "model.embed_tokens")
    layers = [
        _block(config, builder, index, f"model.layers.{index}", names, mixer(builder, config, index))
        for index in range(config.layers)
    ]
    return Decoder(builder, config, vocab, layers, _norm(config, builder, "model.norm"))


def dense_builder(builder: LayerBuilder, config: ModelConfig) -> LayerBuilder:
    """The builder of dense feed-forward layers, which ``ModelConfig.whole_dense`` leaves undivided."""
    return dataclasses.replace(builder, mesh=Group()) if config.whole_dense else builder


def _pre_norm_layer(config: ModelConfig, builder: LayerBuilder, index: int, names: ExpertNames) -> PreNormLayer:
    name, experts = f"model.layers.{index}", config.experts
    first = builder.norm(f"{name}.input_layernorm", config.norm_eps)
    attention = gqa.attention(builder, config, f"{name}.self_attn", config.windows[index])
    second = builder.norm(f"{name}.post_attention_layernorm", config.norm_eps)
    feed_forward: FeedForward | NormThenLinear
    if experts is not None and index in experts.layers:
        feed_forward = NormThenLinear(second, moe.SparseFeedForward(builder, experts, name, names))
    else:
        feed_forward = mlp.feed_forward(dense_builder(builder, config), second, f"{name}.mlp")
    return PreNormLayer(builder, first, attention, second, feed_forward)


def _block(
    config: ModelConfig, builder: LayerBuilder, index: int, name: str, names: ExpertNames, attention: AttentionLayer
) -> Block:
    experts = config.experts
    norms = Norms(
        before_attention=_norm(config, builder, f"{name}.input_layernorm"),
        before_mlp=None if config.parallel_residual else _norm(config, builder, f"{name}.post_attention_layernorm"),
    )
    feed_forward: Linear
    if experts is not None and index in experts.layers:
        feed_forward = moe.SparseFeedForward(builder, experts, name, names)
    else:
        feed_forward = gated_mlp(dense_builder(builder, config), config, f"{name}.mlp")
    return Block(builder, config, attention, feed_forward, norms, config.parallel_residual)
