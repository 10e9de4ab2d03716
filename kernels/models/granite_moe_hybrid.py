"""Granite 4 (IBM, https://github.com/ibm-granite/granite-4.0-language-models): Granite's decoder and its multipliers,
in which most layers are Mamba 2, the others attention, often without positions. All have a gated feed-forward layer,
and most models experts beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import Tensor

from kernels.contract.caches import CacheGroup
from kernels.core.operators import Linear
from kernels.models import granite
from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, mamba, moe, pre_norm, recurrent, vocabulary
from kernels.models.layers.block import AttentionLayer, Block, Norms, attention
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.models.layers.mamba import Mamba, MambaConfig
from kernels.models.layers.moe import ExpertNames
from kernels.weights.tensors import Role, TensorSpec, by_inputs, by_outputs, linear, norm

__all__ = ["EXPERTS", "build", "caches", "config", "tensors"]

EXPERTS = ExpertNames(
    "block_sparse_moe",
    "gate_proj",
    "up_proj",
    "down_proj",
    router="router.layer",
    both="block_sparse_moe.input_linear.weight",
    down_of_all="block_sparse_moe.output_linear.weight",
)
_KINDS = {"mamba": "mamba", "linear_attention": "mamba", "attention": "attention", "full_attention": "attention"}


@dataclasses.dataclass(frozen=True)
class GraniteConfig(MambaConfig):
    """Mamba's sizes. ``gates_apart``: whether the layer that all tokens take has two matrices, as in GGUF files."""

    gates_apart: bool = False


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    experts = None
    if raw.raw.get("num_local_experts", 8):
        count, chosen = ConfigReader({"num_experts_per_tok": 2, **raw.raw}, raw.architecture).expert_counts()
        inner = raw.size("intermediate_size")
        experts = ExpertsConfig(frozenset(range(raw.layers)), count, chosen, inner, normalized=True)
    kinds = raw.layer_types(*_KINDS) or ("mamba",) * raw.layers
    shared = ConfigReader(
        {**raw.raw, "intermediate_size": raw.size("shared_intermediate_size", 1024)}, raw.architecture
    )
    plain = granite.config(shared)
    rope = plain.rope
    if raw.raw.get("position_embedding_type") != "rope":
        rope = dataclasses.replace(rope, kind="none")
    own = mamba.read(raw, raw.size("mamba_expand", 2) * plain.hidden_size)
    sizes = {field.name: getattr(own, field.name) for field in dataclasses.fields(own)}
    return dataclasses.replace(
        plain,
        rope=rope,
        experts=experts,
        recurrence=GraniteConfig(**sizes, gates_apart=raw.flag("gates_apart")),
        recurrent=frozenset(layer for layer, kind in enumerate(kinds) if _KINDS[kind] == "mamba"),
    )


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    hidden = config.hidden_size
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer, gguf = f"model.layers.{index}", f"blk.{index}"
        yield from pre_norm.norm_tensors(config, layer, gguf)
        if index in config.recurrent:
            yield from mamba.tensors(config, f"{layer}.mamba", gguf)
        else:
            yield from gqa.interleaved_tensors(config, f"{layer}.self_attn", f"{gguf}.attn")
        ending = ""
        if config.experts is not None:
            yield from moe.tensors(config.experts, hidden, layer, gguf, EXPERTS)
            ending = "_shexp"
        yield from _shared_tensors(config, f"{layer}.shared_mlp", gguf, ending)
    yield norm("model.norm", hidden, "output_norm")


def _shared_tensors(config: ModelConfig, module: str, gguf: str, ending: str) -> Iterator[TensorSpec]:
    """Gates and others are one matrix of checkpoints, and two of GGUF files."""
    hidden, inner = config.hidden_size, config.intermediate_size
    if _sizes(config).gates_apart:
        for name in ("gate", "up"):
            place = f"{gguf}.ffn_{name}{ending}"
            yield from linear(f"{module}.{name}_proj", (inner, hidden), by_outputs((inner, inner)), place)
    else:
        yield from linear(f"{module}.input_linear", (2 * inner, hidden), by_outputs(*2 * [(inner, inner)]))
    down, place = f"{module}.output_linear", f"{gguf}.ffn_down{ending}"
    yield from linear(down, (hidden, inner), by_inputs(inner, inner), place, role=Role.DOWN)


def _sizes(config: ModelConfig) -> GraniteConfig:
    assert isinstance(config.recurrence, GraniteConfig)
    return config.recurrence


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """Keys and values of the layers with attention, states of the others."""
    return recurrent.with_attention(config, gqa.caches(config))


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config)
    layers = [_layer(config, builder, index) for index in range(config.layers)]
    return Decoder(builder, config, vocab, layers, builder.norm("model.norm", config.norm_eps))


def _layer(config: ModelConfig, builder: LayerBuilder, index: int) -> Block:
    name = f"model.layers.{index}"
    norms = Norms(
        before_attention=builder.norm(f"{name}.input_layernorm", config.norm_eps),
        before_mlp=builder.norm(f"{name}.post_attention_layernorm", config.norm_eps),
    )
    mixer: AttentionLayer
    if index in config.recurrent:
        mixer = Mamba(builder, config, f"{name}.mamba")
    else:
        mixer = attention(builder, config, f"{name}.self_attn", 0)
    return Block(builder, config, mixer, _feed_forward(config, builder, name), norms)


def _feed_forward(config: ModelConfig, builder: LayerBuilder, layer: str) -> Linear:
    """The layer that all tokens take, and the experts beside it."""
    names = ("gate_proj", "up_proj") if _sizes(config).gates_apart else ("input_linear",)
    gate_up = builder.gated(*(f"{layer}.shared_mlp.{name}" for name in names))
    down = builder.row_parallel(f"{layer}.shared_mlp.output_linear")
    if config.experts is None:
        return lambda x: down(gate_up(x))
    experts = moe.SparseFeedForward(builder, config.experts, layer, EXPERTS)

    def both(x: Tensor) -> Tensor:
        return experts(x) + down(gate_up(x))

    return both
