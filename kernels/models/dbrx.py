"""DBRX (Databricks, https://github.com/databricks/dbrx): layer norms without biases, one clamped projection of queries,
keys and values, and in every layer experts that checkpoints hold one below the other in three matrices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from kernels.contract.errors import ConfigError
from kernels.core.layer_context import ExpertModules
from kernels.core.operators import Linear
from kernels.devices.experts import ExpertWeights, Routing
from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, moe, vocabulary
from kernels.models.layers.block import Block, Norms, SelfAttention
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.weights.tensors import Role, TensorSpec, by_inputs, by_outputs, linear, norm

__all__ = ["build", "caches", "config", "tensors"]

caches = gqa.caches
_EMBED = "transformer.wte"
_PARTS = "w1", "v1", "w2"  # gate, up and down


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json, whose parts ``attn_config`` and ``ffn_config`` have some of them."""
    attention, sparse = _part(raw, "attn_config"), _part(raw, "ffn_config")
    given = {
        "hidden_size": raw.raw.get("d_model"),
        "num_attention_heads": raw.raw.get("n_heads"),
        "num_hidden_layers": raw.raw.get("n_layers"),
        "max_position_embeddings": raw.raw.get("max_seq_len"),
        "num_key_value_heads": attention.get("kv_n_heads"),
        "rope_theta": attention.get("rope_theta"),
        "intermediate_size": sparse.get("ffn_hidden_size"),
        "num_experts": sparse.get("moe_num_experts"),
        "num_experts_per_tok": sparse.get("moe_top_k"),
    }
    own = ConfigReader(
        {**raw.raw, **{key: value for key, value in given.items() if value is not None}}, raw.architecture
    )
    power = sparse.get("moe_normalize_expert_weights", 1.0)
    if power not in (None, 1):
        raise ConfigError(f"config.json: moe_normalize_expert_weights must be 1 or null, and is {power!r}")
    count, chosen = own.expert_counts()
    inner, layers = own.size("intermediate_size"), frozenset(range(own.layers))
    apart = raw.flag("experts_apart")
    experts = ExpertsConfig(layers, count, chosen, inner, normalized=power is not None, apart=apart)
    plain = own.decoder(experts=experts, norm_eps="layer_norm_eps", eps=1e-5)
    clip = ConfigReader(attention, raw.architecture).number("clip_qkv", 0.0)
    return dataclasses.replace(plain, qkv_clip=clip)


def _part(raw: ConfigReader, key: str) -> dict[str, Any]:
    part = raw.raw.get(key) or {}
    if not isinstance(part, dict):
        raise ConfigError(f"config.json: {key} must be an object, and is {part!r}")
    return part


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    assert config.experts is not None
    hidden, heads, kv_heads, dim = config.hidden_size, config.heads, config.kv_heads, config.head_dim
    queries, keys, inner, count = heads * dim, kv_heads * dim, config.experts.inner, config.experts.count
    yield from vocabulary.tensors(config, _EMBED)
    for index in range(config.layers):
        name, gguf = f"transformer.blocks.{index}", f"blk.{index}"
        module, experts = f"{name}.norm_attn_norm", f"{name}.ffn.experts.mlp"
        yield norm(f"{module}.norm_1", hidden, f"{gguf}.attn_norm")
        yield norm(f"{module}.norm_2", hidden, f"{gguf}.attn_output_norm")
        both = by_outputs((queries, heads), (keys, kv_heads), (keys, kv_heads))
        yield from linear(f"{module}.attn.Wqkv", (queries + 2 * keys, hidden), both, f"{gguf}.attn_qkv")
        output, inputs = f"{module}.attn.out_proj", by_inputs(queries, heads)
        yield from linear(output, (hidden, queries), inputs, f"{gguf}.attn_output")
        yield from linear(f"{name}.ffn.router.layer", (count, hidden), None, f"{gguf}.ffn_gate_inp", role=Role.ROUTER)
        if config.experts.apart:
            yield from moe.expert_tensors(config.experts, hidden, experts, gguf)
            continue
        of_all = by_outputs(*[(inner, inner)] * count)
        for part in _PARTS:
            yield TensorSpec(f"{experts}.{part}", (count * inner, hidden), Role.EXPERTS, of_all)
    yield norm("transformer.norm_f", hidden, "output_norm")


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config, _EMBED)
    layers = [_layer(config, builder, f"transformer.blocks.{index}") for index in range(config.layers)]
    return Decoder(builder, config, vocab, layers, builder.layer_norm("transformer.norm_f", eps=config.norm_eps))


def _layer(config: ModelConfig, builder: LayerBuilder, name: str) -> Block:
    module = f"{name}.norm_attn_norm"
    norms = Norms(
        before_attention=builder.layer_norm(f"{module}.norm_1", eps=config.norm_eps),
        before_mlp=builder.layer_norm(f"{module}.norm_2", eps=config.norm_eps),
    )
    qkv = gqa.clipped(builder, config, builder.linear(f"{module}.attn.Wqkv"))
    attention = SelfAttention(builder, config, qkv, builder.row_parallel(f"{module}.attn.out_proj"), 0)
    return Block(builder, config, attention, _experts(config, builder, f"{name}.ffn"), norms)


def _experts(config: ModelConfig, builder: LayerBuilder, module: str) -> Linear:
    """``sum(weight[e] * (silu(x @ w1[e].T) * (x @ v1[e].T)) @ w2[e])`` over the experts e that a token takes."""
    sizes, mesh = config.experts, builder.mesh
    assert sizes is not None
    names = [f"{module}.experts.mlp.{part}" for part in _PARTS]
    apart = "its tensors hold all experts; adapters change them apart, as in experts.mlp_experts.0.w1"
    builder.refuse_adapters((f"{module}.experts.mlp",), apart)
    modules = [tuple(f"{module}.experts.mlp_experts.{n}.{part}" for part in _PARTS) for n in range(sizes.count)]
    both = sizes.inner * mesh.size, config.hidden_size
    named = ExpertModules("", modules, range(sizes.count), both, router=f"{module}.router.layer")
    adapted = moe.adapted_experts(builder, named)
    if sizes.apart:
        experts = moe.expert_weights(builder, sizes, f"{module}.experts.mlp")
    else:
        firsts, others, lasts = (builder.source.take([name]).view(sizes.count, sizes.inner, -1) for name in names)
        experts = [
            ExpertWeights(torch.cat((gate, up)), None, down.t().contiguous(), None)
            for gate, up, down in zip(firsts, others, lasts, strict=True)
        ]
    router = builder.source.take([f"{module}.router.layer.weight"])
    routing, layers = Routing(sizes.chosen, sizes.normalized), builder.ops.experts
    layer: Linear = (
        layers.make(router, None, experts, routing)
        if adapted is None
        else layers.make_in_turn(
            moe.adapted_router(builder, layers.make_router(router, None, routing), adapted),
            experts,
            routing,
            moe.ADAPTED,
            adapted=adapted,
        )
    )
    return layer if mesh.size == 1 else lambda x: mesh.all_reduce(layer(x))
