"""Llama 4, its language model (Meta, https://ai.meta.com/blog/llama-4-multimodal-intelligence): three of four layers
rotate heads, which may be normed, and attend in chunks. The fourth sees all tokens and has no positions; its queries
grow. In each layer or in every other one, experts stand beside one that all tokens take.

    expert e of a token:  w = sigmoid(router(x)[e]);  down[e](silu(gate[e](w * x)) * up[e](w * x))

Checkpoints hold the experts of a layer in two tensors, their inputs first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.contract.errors import ConfigError
from kernels.core.operators import Linear
from kernels.devices.experts import Experts, ExpertWeights, Routing
from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig, QueryGrowth
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, mlp, moe, pre_norm, vocabulary
from kernels.models.layers.block import Block, Norms, SelfAttention, gated_mlp
from kernels.models.layers.builder import ModelBuilder
from kernels.weights.tensors import GgufPlace, Role, Split, TensorSpec, linear, norm

__all__ = ["build", "caches", "config", "tensors"]

caches = gqa.caches


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    inner, bias, still = raw.size("intermediate_size"), raw.flag("attention_bias"), _unrotated(raw)
    raw = ConfigReader({"num_experts_per_tok": 1, **raw.raw}, raw.architecture)
    count, chosen = raw.expert_counts()
    experts = ExpertsConfig(
        _sparse_layers(raw), count, chosen, inner, normalized=False, shared=inner, weighted=False, scores="sigmoid"
    )
    experts = dataclasses.replace(experts, apart=raw.flag("experts_apart"))
    sizes = {"intermediate_size": raw.size("intermediate_size_mlp", 2 * inner)}
    plain = ConfigReader({**raw.raw, **sizes}, raw.architecture).decoder(
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=raw.flag("use_qk_norm", True),
        windows=_windows(raw, still),
        experts=experts,
        eps=1e-5,
        head_dim=128,
        theta=500000.0,
    )
    growth = None
    if raw.flag("attn_temperature_tuning", True):
        growth = QueryGrowth(raw.number("attn_scale", 0.1), raw.size("floor_scale", 8192), 1)
    nothing = dataclasses.replace(plain.rope, kind="none")
    return dataclasses.replace(plain, rope_interleaved=True, ropes=dict.fromkeys(still, nothing), query_growth=growth)


def _unrotated(raw: ConfigReader) -> list[int]:
    """The layers without positions: where ``no_rope_layers`` is 0, or every ``no_rope_layer_interval``-th."""
    layers, given = raw.layers, raw.raw.get("no_rope_layers")
    if not given:
        every = raw.size("no_rope_layer_interval", 4)
        return [layer for layer in range(layers) if (layer + 1) % every == 0]
    if not isinstance(given, list) or len(given) < layers:
        raise ConfigError(f"config.json: no_rope_layers must have 0 or 1 for each layer, and is {given!r}")
    return [layer for layer in range(layers) if not given[layer]]


def _windows(raw: ConfigReader, still: list[int]) -> tuple[int, ...]:
    """Chunks of ``attention_chunk_size`` in the layers of ``layer_types``, or in those that rotate."""
    kinds, layers = raw.raw.get("layer_types"), raw.layers
    chunk = 0 if raw.raw.get("attention_chunk_size", 8192) is None else raw.size("attention_chunk_size", 8192)
    if kinds is None:
        return tuple(0 if layer in still else -chunk for layer in range(layers))
    known = ("full_attention", "chunked_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise ConfigError("config.json: layer_types must say full_attention or chunked_attention for each layer")
    return tuple(-chunk if kind == "chunked_attention" else 0 for kind in kinds)


def _sparse_layers(raw: ConfigReader) -> frozenset[int]:
    """``moe_layers``, or every ``interleave_moe_layer_step``-th."""
    given, every = raw.raw.get("moe_layers"), raw.size("interleave_moe_layer_step", 1)
    if given is None:
        return frozenset(range(every - 1, raw.layers, every))
    if not isinstance(given, list) or not all(type(layer) is int for layer in given):
        raise ConfigError(f"config.json: moe_layers must be a list of layers, and is {given!r}")
    return frozenset(given) & frozenset(range(raw.layers))


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    experts, unnormed = config.experts, dataclasses.replace(config, qk_norm=False)
    assert experts is not None
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer, gguf = f"model.layers.{index}", f"blk.{index}"
        yield from pre_norm.norm_tensors(config, layer, gguf)
        yield from gqa.tensors(unnormed, f"{layer}.self_attn", f"{gguf}.attn")
        if index in experts.layers:
            yield from _expert_tensors(config, f"{layer}.feed_forward", gguf)
        else:
            yield from mlp.tensors(config, f"{layer}.feed_forward", f"{gguf}.ffn")
    yield norm("model.norm", config.hidden_size, "output_norm")


def _expert_tensors(config: ModelConfig, module: str, gguf: str) -> Iterator[TensorSpec]:
    experts = config.experts
    assert experts is not None
    count, inner, hidden = experts.count, experts.inner, config.hidden_size
    yield from linear(f"{module}.router", (count, hidden), gguf=f"{gguf}.ffn_gate_inp", role=Role.ROUTER)
    if experts.apart:
        yield from moe.expert_tensors(experts, hidden, f"{module}.experts", gguf)
    else:
        halves, columns = Split(2, ((inner, inner), (inner, inner))), Split(1, ((inner, inner),))
        yield TensorSpec(f"{module}.experts.gate_up_proj", (count, hidden, 2 * inner), Role.EXPERTS, halves)
        yield TensorSpec(f"{module}.experts.down_proj", (count, inner, hidden), Role.EXPERTS, columns)
    shared = dataclasses.replace(config, intermediate_size=experts.shared)
    for spec in mlp.tensors(shared, f"{module}.shared_expert", f"{gguf}.ffn"):
        place = None if spec.gguf is None else GgufPlace(spec.gguf.name.replace(".weight", "_shexp.weight"))
        yield dataclasses.replace(spec, gguf=place)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config)
    layers = [_layer(config, builder, index) for index in range(config.layers)]
    return Decoder(builder, config, vocab, layers, builder.norm("model.norm", config.norm_eps))


def _layer(config: ModelConfig, builder: ModelBuilder, index: int) -> Block:
    name, experts = f"model.layers.{index}", config.experts
    assert experts is not None
    norms = Norms(
        before_attention=builder.norm(f"{name}.input_layernorm", config.norm_eps),
        before_mlp=builder.norm(f"{name}.post_attention_layernorm", config.norm_eps),
    )
    attention, feed_forward = _attention(config, builder, f"{name}.self_attn", index), f"{name}.feed_forward"
    if index in experts.layers:
        return Block(builder, config, attention, _SparseFeedForward(config, builder, feed_forward), norms)
    return Block(builder, config, attention, gated_mlp(builder, config, feed_forward), norms)


def _attention(config: ModelConfig, builder: ModelBuilder, module: str, index: int) -> SelfAttention:
    """Heads are normed without weights, before they are rotated: a rotation leaves their length as it is."""
    rotated, head_norm = index not in config.ropes, None
    if config.qk_norm and rotated:
        shape = config.heads + config.kv_heads, config.head_dim
        ones = torch.ones(shape, dtype=builder.dtype, device=builder.ops.torch_device)
        head_norm = builder.ops.elementwise.make_norm(ones, config.norm_eps)
    return SelfAttention(
        builder,
        config,
        gqa.projection(builder, config, f"{module}.q_proj", f"{module}.k_proj", f"{module}.v_proj"),
        builder.row_parallel(f"{module}.o_proj"),
        config.windows[index],
        norm=head_norm,
        growth=None if rotated else config.query_growth,
    )


class _SparseFeedForward:
    """The experts of one layer, and the one that all tokens take."""

    def __init__(self, config: ModelConfig, builder: ModelBuilder, module: str) -> None:
        self.shared, self.routes, self.group = (
            gated_mlp(builder, config, f"{module}.shared_expert"),
            builder.routes,
            builder.mesh,
        )
        self.experts = experts = _experts(config, builder, module)
        self.run: Linear = builder.ops.elementwise.compose(experts, lambda x: x)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        if self.routes.is_open:
            self.routes.add(self.experts.choose(x))
        result = self.run(x)
        return self.shared(x) + (result if self.group.size == 1 else self.group.all_reduce(result))


def _experts(config: ModelConfig, builder: ModelBuilder, module: str) -> Experts:
    sizes, take = config.experts, builder.source.take
    assert sizes is not None
    both, down = f"{module}.experts.gate_up_proj", f"{module}.experts.down_proj"
    adapted = moe.stacked_adapters(builder, sizes, config.hidden_size, f"{module}.experts", router=f"{module}.router")
    if sizes.apart:
        weights = moe.expert_weights(builder, sizes, f"{module}.experts")
    else:
        weights = [
            ExpertWeights(first.t().contiguous(), None, last.t().contiguous(), None)
            for first, last in zip(take([both]), take([down]), strict=True)
        ]
    routing = Routing(sizes.chosen, sizes.normalized, sizes.scores, on_inputs=True)
    layers = builder.ops.experts
    router = layers.make_router(take([f"{module}.router.weight"]), None, routing)
    if adapted is not None:
        router = moe.adapted_router(builder, router, adapted)
        return layers.make_in_turn(router, weights, routing, moe.ADAPTED, adapted=adapted)
    return layers.make_routed(router, weights, routing)
