"""gpt-oss (OpenAI, arXiv 2508.10925): layers with a window and with full attention take turns, heads have sinks, and
every feed-forward layer is of experts, whose gates are clamped. Checkpoints hold all experts of a layer in one tensor,
gates and others in alternating columns; published ones are in MXFP4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.contract.caches import CacheGroup
from kernels.contract.errors import ConfigError
from kernels.core.operators import Linear
from kernels.devices.experts import ClampedGate, ExpertWeights, Routing
from kernels.distributed.group import Group
from kernels.models.config import MXFP4_BLOCK, ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, moe, pre_norm, vocabulary
from kernels.models.layers.block import Block, Norms, attention
from kernels.models.layers.builder import ModelBuilder
from kernels.weights.quantization.mxfp4 import Mxfp4Weight
from kernels.weights.quantization.weights import Projection
from kernels.weights.tensors import GgufPlace, Role, Split, TensorSpec, linear, norm

__all__ = ["build", "caches", "config", "tensors"]


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    raw = ConfigReader({"sliding_window": 128, "attention_bias": True, **raw.raw}, raw.architecture)
    count, chosen = raw.expert_counts()
    quantization = raw.raw.get("quantization_config")
    experts = ExpertsConfig(
        frozenset(range(raw.layers)),
        count,
        chosen,
        raw.size("intermediate_size"),
        normalized=True,
        alpha=raw.number("swiglu_alpha", 1.702),
        limit=raw.number("swiglu_limit", 7.0),
        packed=isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4",
        apart=raw.flag("experts_apart"),
    )
    if experts.packed and (experts.inner % MXFP4_BLOCK or raw.size("hidden_size") % MXFP4_BLOCK):
        raise ConfigError(f"experts in mxfp4 need a hidden_size and an intermediate_size in blocks of {MXFP4_BLOCK}")
    bias, windows = raw.flag("attention_bias"), raw.patterned_windows(2)
    plain = raw.decoder(
        qkv_bias=bias,
        output_bias=bias,
        windows=windows,
        experts=experts,
        eps=1e-5,
        head_dim=64,
        theta=150000.0,
    )
    return dataclasses.replace(plain, sinks=True)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer, gguf = f"model.layers.{index}", f"blk.{index}"
        yield from pre_norm.norm_tensors(config, layer, gguf, "post_attention_norm")
        yield from gqa.tensors(config, f"{layer}.self_attn", f"{gguf}.attn")
        router, shape = f"{layer}.mlp.router", (_experts_of(config).count, config.hidden_size)
        yield from linear(router, shape, None, f"{gguf}.ffn_gate_inp", bias=True, role=Role.ROUTER)
        if _experts_of(config).apart:
            yield from _apart_tensors(config, f"{layer}.mlp.experts", gguf)
        else:
            yield from _expert_tensors(config, f"{layer}.mlp")
    yield norm("model.norm", config.hidden_size, "output_norm")


def _experts_of(config: ModelConfig) -> ExpertsConfig:
    assert config.experts is not None
    return config.experts


def _apart_tensors(config: ModelConfig, module: str, gguf: str) -> Iterator[TensorSpec]:
    """The experts of a GGUF file, whose gates and others are apart."""
    experts, hidden = _experts_of(config), config.hidden_size
    yield from moe.expert_tensors(experts, hidden, module, gguf)
    by_inner = Split(1, ((experts.inner, experts.inner),))
    for name, outputs, split in (
        ("gate", experts.inner, by_inner),
        ("up", experts.inner, by_inner),
        ("down", hidden, None),
    ):
        place = GgufPlace(f"{gguf}.ffn_{name}_exps.bias")
        yield TensorSpec(f"{module}.{name}_proj.bias", (experts.count, outputs), Role.BIAS, split, place)


def _expert_tensors(config: ModelConfig, module: str) -> Iterator[TensorSpec]:
    count, inner, hidden = _experts_of(config).count, _experts_of(config).inner, config.hidden_size
    both, down = f"{module}.experts.gate_up_proj", f"{module}.experts.down_proj"
    pairs = (2 * inner, inner)
    if _experts_of(config).packed:
        blocks = inner // MXFP4_BLOCK
        for name, outputs, inputs, split in (
            (both, 2 * inner, hidden // MXFP4_BLOCK, Split(1, (pairs,))),
            (down, hidden, blocks, Split(2, ((blocks, blocks),))),
        ):
            yield TensorSpec(f"{name}_blocks", (count, outputs, inputs, MXFP4_BLOCK // 2), Role.NIBBLES, split)
            yield TensorSpec(f"{name}_scales", (count, outputs, inputs), Role.EXPONENTS, split)
    else:
        yield TensorSpec(both, (count, hidden, 2 * inner), Role.EXPERTS, Split(2, (pairs,)))
        yield TensorSpec(down, (count, inner, hidden), Role.EXPERTS, Split(1, ((inner, inner),)))
    yield TensorSpec(f"{both}_bias", (count, 2 * inner), Role.BIAS, Split(1, (pairs,)))
    yield TensorSpec(f"{down}_bias", (count, hidden), Role.BIAS)


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """The caches of the layers."""
    return gqa.caches(config)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config)
    layers = [_layer(config, builder, f"model.layers.{index}", window) for index, window in enumerate(config.windows)]
    return Decoder(builder, config, vocab, layers, builder.norm("model.norm", config.norm_eps))


def _layer(config: ModelConfig, builder: ModelBuilder, name: str, window: int) -> Block:
    norms = Norms(
        before_attention=builder.norm(f"{name}.input_layernorm", config.norm_eps),
        before_mlp=builder.norm(f"{name}.post_attention_layernorm", config.norm_eps),
    )
    result = attention(builder, config, f"{name}.self_attn", window)
    return Block(builder, config, result, _experts(config, builder, f"{name}.mlp"), norms)


def _experts(config: ModelConfig, builder: ModelBuilder, module: str) -> Linear:
    """The experts of one layer."""
    sizes, take, mesh = _experts_of(config), builder.source.take, builder.mesh
    both, down = f"{module}.experts.gate_up_proj", f"{module}.experts.down_proj"
    adapted = moe.stacked_adapters(
        builder, sizes, config.hidden_size, f"{module}.experts", router=f"{module}.router", alternate=True
    )
    firsts: Sequence[Projection]
    lasts: Sequence[Projection]
    if sizes.apart:
        weights = moe.expert_weights(builder, sizes, f"{module}.experts")
        firsts, lasts = [expert.gate_up for expert in weights], [expert.down for expert in weights]
    elif sizes.packed:
        firsts = _packed(builder, both, apart=True)
        lasts = _packed(builder, down, apart=False)
    else:
        firsts = [_apart(expert.t()) for expert in take([both])]
        lasts = [expert.t().contiguous() for expert in take([down])]
    if sizes.apart:
        gates, others, ends = (take([f"{module}.experts.{part}_proj.bias"]) for part in ("gate", "up", "down"))
        biases = torch.cat((gates, others), 1)
    else:
        biases, ends = torch.stack([_apart(bias) for bias in take([f"{both}_bias"])]), take([f"{down}_bias"])
    experts = [
        ExpertWeights(first, bias, last, end if mesh.rank == 0 else None)
        for first, last, bias, end in zip(firsts, lasts, biases, ends, strict=True)
    ]
    router, bias = take([f"{module}.router.weight"]), take([f"{module}.router.bias"])
    routing, gate = Routing(sizes.chosen, sizes.normalized), ClampedGate(sizes.alpha, sizes.limit)
    layers = builder.ops.experts
    if adapted is None:
        layer: Linear = layers.make(router, bias, experts, routing, gate)
    else:
        made = moe.adapted_router(builder, layers.make_router(router, bias, routing), adapted)
        layer = layers.make_in_turn(made, experts, routing, moe.ADAPTED, gate, adapted=adapted)
    return layer if mesh.size == 1 else _summed(mesh, layer)


def _summed(mesh: Group, layer: Linear) -> Linear:
    return lambda x: mesh.all_reduce(layer(x))


def _packed(builder: ModelBuilder, name: str, apart: bool) -> list[Mxfp4Weight]:
    """The weights of all experts. ``apart``: gates are put before the others."""
    blocks, scales = builder.source.take([f"{name}_blocks"]), builder.source.take([f"{name}_scales"])
    if apart:
        return [
            Mxfp4Weight.from_blocks(_apart(one), _apart(own), builder.dtype)
            for one, own in zip(blocks, scales, strict=True)
        ]
    return [Mxfp4Weight.from_blocks(one, own, builder.dtype) for one, own in zip(blocks, scales, strict=True)]


def _apart(rows: Tensor) -> Tensor:
    """Alternating rows, the even ones first."""
    return torch.cat((rows[::2], rows[1::2]))
