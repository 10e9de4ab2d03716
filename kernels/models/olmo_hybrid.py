"""OLMo Hybrid (https://huggingface.co/allenai/Olmo-Hybrid-7B): three of four layers are gated delta nets between norms
before them, the others OLMo 3's attention between norms after it.

Betas reach 2 with ``linear_allow_neg_eigval``: a state may then turn an answer around (Grazzi et al., arXiv
2411.12537).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import Tensor

from kernels.contract.caches import CacheGroup
from kernels.devices.delta_rule import DeltaInputs
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import delta_net, gqa, mlp, recurrent, vocabulary
from kernels.models.layers.block import Block, Norms, gated_mlp, wide_attention
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.models.layers.delta_net import DeltaConfig, GatedDeltaNet, HeadGates
from kernels.models.layers.recurrent import CausalConvolution
from kernels.weights.tensors import Role, TensorSpec, by_inputs, by_outputs, linear, norm

__all__ = ["build", "caches", "config", "tensors"]

_NORM_EPS = 1e-5  # of the delta nets' results, whatever the other norms have


@dataclasses.dataclass(frozen=True)
class _HybridConfig(DeltaConfig):
    """``max_beta``: what betas reach."""

    max_beta: float = 1.0


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    bias, layers = raw.flag("attention_bias"), raw.layers
    plain = raw.decoder(qkv_bias=bias, output_bias=bias)
    kinds = raw.layer_types("linear_attention", "full_attention") or tuple(
        "full_attention" if layer % 4 == 3 or (layers < 4 and layer == layers - 1) else "linear_attention"
        for layer in range(layers)
    )
    heads = raw.size("linear_num_key_heads", plain.heads)
    dim = raw.size("linear_key_head_dim", 3 * plain.hidden_size // (4 * heads))
    own = {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": raw.size("linear_num_value_heads", plain.heads),
        "linear_key_head_dim": dim,
        "linear_value_head_dim": raw.size("linear_value_head_dim", 2 * dim),
    }
    delta = delta_net.read(ConfigReader({**raw.raw, **own}, raw.architecture), grouped=False)
    max_beta = 2.0 if raw.flag("linear_allow_neg_eigval", True) else 1.0
    parameters = raw.raw.get("rope_parameters")
    theta = parameters.get("rope_theta") if isinstance(parameters, dict) else raw.raw.get("rope_theta")
    rope = plain.rope if theta is not None else dataclasses.replace(plain.rope, kind="none")
    return dataclasses.replace(
        plain,
        rope=rope,
        recurrence=_HybridConfig(**dataclasses.asdict(delta), max_beta=max_beta),
        recurrent=frozenset(layer for layer, kind in enumerate(kinds) if kind == "linear_attention"),
    )


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer, names = f"model.layers.{index}", _norms(config, index)
        if index in config.recurrent:
            yield from _delta_tensors(config, f"{layer}.linear_attn")
        else:
            yield from gqa.wide_tensors(config, f"{layer}.self_attn", "")
        for name, other in names.items():
            spec = norm(f"{layer}.{name}", config.hidden_size)
            yield dataclasses.replace(spec, aliases=(f"{layer}.{other}.weight",)) if other else spec
        yield from mlp.tensors(config, f"{layer}.mlp", "")
    yield norm("model.norm", config.hidden_size)


def _norms(config: ModelConfig, index: int) -> dict[str, str]:
    """The norms of a layer, and other names of them."""
    if index not in config.recurrent:
        return {"post_attention_layernorm": "", "post_feedforward_layernorm": ""}
    return {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}


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
    first, second = (builder.norm(f"{name}.{part}", config.norm_eps) for part in _norms(config, index))
    feed_forward = gated_mlp(builder, config, f"{name}.mlp")
    if index not in config.recurrent:
        norms = Norms(after_attention=first, after_mlp=second)
        return Block(builder, config, wide_attention(builder, config, f"{name}.self_attn", 0), feed_forward, norms)
    norms = Norms(before_attention=first, before_mlp=second)
    return Block(builder, config, _delta_net(builder, config, f"{name}.linear_attn"), feed_forward, norms)


def _sizes(config: ModelConfig) -> _HybridConfig:
    assert isinstance(config.recurrence, _HybridConfig), "config reads config.json"
    return config.recurrence


def _delta_tensors(config: ModelConfig, module: str) -> Iterator[TensorSpec]:
    delta, hidden = _sizes(config), config.hidden_size
    heads = delta.value_heads
    keys, values = (delta.keys, delta.key_heads), (delta.values, heads)
    for part, section in (("q", keys), ("k", keys), ("v", values)):
        yield from linear(f"{module}.{part}_proj", (section[0], hidden), by_outputs(section))
        yield TensorSpec(f"{module}.{part}_conv1d.weight", (section[0], 1, delta.taps), Role.WIDE, by_outputs(section))
    for part in "ba":
        yield from linear(f"{module}.{part}_proj", (heads, hidden), by_outputs((heads, heads)))
    yield from linear(f"{module}.g_proj", (delta.values, hidden), by_outputs(values))
    for name in ("A_log", "dt_bias"):
        yield TensorSpec(f"{module}.{name}", (heads,), Role.WIDE, by_outputs((heads, heads)))
    yield norm(f"{module}.o_norm", delta.value_dim)
    yield from linear(f"{module}.o_proj", (hidden, delta.values), by_inputs(delta.values, heads))


def _delta_net(builder: LayerBuilder, config: ModelConfig, module: str) -> GatedDeltaNet:
    delta, source = _sizes(config), builder.source
    heads = delta.value_heads
    projection = builder.linear(*(f"{module}.{part}_proj" for part in "qkvgba"))
    head_gates = HeadGates(builder, module)

    def inputs(x: Tensor) -> DeltaInputs:
        mixed, gates, b, a = projection(x).split((delta.channels, delta.values, heads, heads), 1)
        betas, decays = head_gates(b, a)
        return DeltaInputs(mixed, gates, betas * delta.max_beta, decays)

    return GatedDeltaNet(
        builder,
        delta,
        inputs,
        CausalConvolution(source.take([f"{module}.{part}_conv1d.weight" for part in "qkv"])),
        builder.norm(f"{module}.o_norm", _NORM_EPS),
        builder.row_parallel(f"{module}.o_proj"),
    )
