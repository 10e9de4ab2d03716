"""DeepSeek V3, R1 and V3.1 (DeepSeek-AI, arXiv 2412.19437), and Kimi K2 (arXiv 2507.20534): latent attention, and
experts that a sigmoid scores and a correction balances, in groups.

Checkpoints hold further layers for the tokens after the next, behind ``num_hidden_layers``.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernels.contract.caches import CacheGroup
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import mla, mlp, moe, pre_norm, vocabulary
from kernels.models.layers.block import Block, Norms, gated_mlp
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.models.layers.mla import LatentAttention
from kernels.models.layers.moe import DEEPSEEK, ExpertNames
from kernels.weights.tensors import TensorSpec, norm

__all__ = ["build", "caches", "config", "tensors"]


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    experts = raw.deepseek_experts(raw.later_layers(3), "sigmoid", pair_sum=True)
    return raw.latent_decoder(experts=experts)


def tensors(config: ModelConfig, names: ExpertNames = DEEPSEEK) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    experts = config.experts
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer, gguf = f"model.layers.{index}", f"blk.{index}"
        yield from pre_norm.norm_tensors(config, layer, gguf)
        yield from mla.tensors(config, f"{layer}.self_attn", f"{gguf}.attn")
        if experts is not None and index in experts.layers:
            yield from moe.tensors(experts, config.hidden_size, layer, gguf, names)
        else:
            yield from mlp.tensors(config, f"{layer}.mlp", f"{gguf}.ffn")
    yield norm("model.norm", config.hidden_size, "output_norm")


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """The caches of the layers."""
    return mla.caches(config)


def build(config: ModelConfig, builder: ModelBuilder, names: ExpertNames = DEEPSEEK) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config)
    layers = [_layer(config, builder, index, names) for index in range(config.layers)]
    return Decoder(builder, config, vocab, layers, builder.norm("model.norm", config.norm_eps))


def _layer(config: ModelConfig, builder: LayerBuilder, index: int, names: ExpertNames) -> Block:
    name, experts = f"model.layers.{index}", config.experts
    norms = Norms(
        before_attention=builder.norm(f"{name}.input_layernorm", config.norm_eps),
        before_mlp=builder.norm(f"{name}.post_attention_layernorm", config.norm_eps),
    )
    attention = LatentAttention(builder, config, f"{name}.self_attn")
    if experts is not None and index in experts.layers:
        return Block(builder, config, attention, moe.SparseFeedForward(builder, experts, name, names), norms)
    return Block(builder, config, attention, gated_mlp(builder, config, f"{name}.mlp"), norms)
