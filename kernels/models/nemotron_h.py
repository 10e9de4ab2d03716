"""Nemotron-H (NVIDIA, arXiv 2504.03624) and Nemotron 3 (arXiv 2512.20856): each layer is one norm and one of Mamba 2,
attention without positions, a feed-forward layer with a squared ReLU, or experts that have no gates.

    h = h + mixer(norm(h))

Some models project tokens to fewer numbers before their experts, and back after them. Checkpoints may hold a head for
the token after the next, ``mtp`` (kernels.speculation.drafters.mtp): a layer of attention and one of experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from kernels.contract.caches import CacheGroup
from kernels.contract.errors import ConfigError
from kernels.core.batch import ForwardBatch
from kernels.core.layer_context import ExpertModules
from kernels.core.operators import Linear, Norm, PendingResidual
from kernels.devices.elementwise import ACTIVATIONS
from kernels.devices.experts import ExpertWeights, Routing
from kernels.devices.linear import norm_of_sum
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, mamba, moe, recurrent, vocabulary
from kernels.models.layers.block import AttentionLayer, Block, Norms, attention, plain_mlp
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.models.layers.mamba import Mamba, MambaConfig, MambaKeys
from kernels.weights.tensors import GgufPlace, Role, StackedExpert, TensorSpec, by_inputs, by_outputs, linear, norm

__all__ = ["NemotronConfig", "build", "caches", "config", "head_config", "head_layer", "head_tensors", "tensors"]

_KEYS = MambaKeys(
    "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "use_conv_bias", "use_bias"
)
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS = {"linear_attention": "mamba", "full_attention": "attention"} | {kind: kind for kind in _PATTERN.values()}
_DEFAULTS = {
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 7688,
    "norm_topk_prob": True,
}


@dataclasses.dataclass(frozen=True)
class NemotronConfig(MambaConfig):
    """Mamba's sizes; ``kinds``: of each layer, mamba | attention | mlp | moe; ``latent``: numbers of a token that
    experts read and return, 0: those of the model."""

    kinds: tuple[str, ...] = ()
    latent: int = 0


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    kinds = _kinds(raw)
    raw = ConfigReader({**_DEFAULTS, **raw.raw, "num_hidden_layers": len(kinds)}, raw.architecture)
    if (activation := raw.raw.get("mlp_hidden_act", "relu2")) != "relu2":
        raise ConfigError(f"mlp_hidden_act {activation!r} is not supported; {raw.architecture} is run with relu2")
    head_dim = raw.size("head_dim" if raw.raw.get("head_dim") else "attention_head_dim", 128)
    of_kind = {kind: frozenset(layer for layer, own in enumerate(kinds) if own == kind) for kind in _PATTERN.values()}
    experts = None
    if of_kind["moe"]:
        experts = dataclasses.replace(
            raw.deepseek_experts(of_kind["moe"], "sigmoid", pair_sum=True),
            shared=raw.size("moe_shared_expert_intermediate_size", 7688) if raw.raw["n_shared_experts"] else 0,
        )
    plain = raw.decoder(experts=experts, activation="relu2", norm_eps="layer_norm_epsilon", eps=1e-5, head_dim=head_dim)
    own = mamba.read(raw, 0, _KEYS)
    sizes = {field.name: getattr(own, field.name) for field in dataclasses.fields(own)}
    return dataclasses.replace(
        plain,
        layer_norms=False,
        rope=dataclasses.replace(plain.rope, kind="none"),
        recurrence=NemotronConfig(
            **sizes, kinds=kinds, latent=raw.size("moe_latent_size") if raw.raw.get("moe_latent_size") else 0
        ),
        recurrent=of_kind["mamba"],
    )


def _kinds(raw: ConfigReader) -> tuple[str, ...]:
    """The kind of each layer, by ``layers_block_type``, or by ``hybrid_override_pattern``, a letter for each."""
    given = raw.raw.get("layers_block_type") or raw.raw.get("layer_types")
    if given is None:
        pattern = raw.raw.get("hybrid_override_pattern", "ME*-")
        if not isinstance(pattern, str) or not pattern or not set(pattern) <= set(_PATTERN):
            raise ConfigError(f"config.json: hybrid_override_pattern must be of M, *, - and E, and is {pattern!r}")
        return tuple(_PATTERN[letter] for letter in pattern)
    if not isinstance(given, list) or not given or not all(isinstance(kind, str) and kind in _KINDS for kind in given):
        raise ConfigError(f"config.json: layers_block_type must be a list of {', '.join(_KINDS)}, and is {given!r}")
    return tuple(_KINDS[kind] for kind in given)


def _sizes(config: ModelConfig) -> NemotronConfig:
    assert isinstance(config.recurrence, NemotronConfig)
    return config.recurrence


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint; newer tools write ``model`` for ``backbone``."""
    for spec in _tensors(config):
        yield dataclasses.replace(spec, aliases=(*spec.aliases, spec.name.replace("backbone.", "model.", 1)))


def _tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    hidden, inner = config.hidden_size, config.intermediate_size
    yield from vocabulary.tensors(config, "backbone.embeddings")
    for index, kind in enumerate(_sizes(config).kinds):
        layer, gguf = f"backbone.layers.{index}", f"blk.{index}"
        yield norm(f"{layer}.norm", hidden, f"{gguf}.attn_norm")
        if kind == "mamba":
            yield from mamba.tensors(config, f"{layer}.mixer", gguf)
        elif kind == "attention":
            yield from gqa.interleaved_tensors(config, f"{layer}.mixer", f"{gguf}.attn")
        elif kind == "mlp":
            yield from _plain_tensors(config, f"{layer}.mixer", f"{gguf}.ffn", inner)
        else:
            yield from _expert_tensors(config, f"{layer}.mixer", gguf)
    yield norm("backbone.norm_f", hidden, "output_norm")


def _plain_tensors(config: ModelConfig, module: str, gguf: str, inner: int, ending: str = "") -> Iterator[TensorSpec]:
    hidden, bias = config.hidden_size, config.mlp_bias
    rows, columns, place = by_outputs((inner, inner)), by_inputs(inner, inner), f"{gguf}_down{ending}"
    yield from linear(f"{module}.up_proj", (inner, hidden), rows, f"{gguf}_up{ending}", bias=bias)
    yield from linear(f"{module}.down_proj", (hidden, inner), columns, place, bias=bias, role=Role.DOWN)


def _expert_tensors(config: ModelConfig, module: str, gguf: str) -> Iterator[TensorSpec]:
    experts, hidden, latent = config.experts, config.hidden_size, _sizes(config).latent
    assert experts is not None
    yield from linear(f"{module}.gate", (experts.count, hidden), gguf=f"{gguf}.ffn_gate_inp", role=Role.ROUTER)
    corrected = GgufPlace(f"{gguf}.exp_probs_b.bias")
    yield TensorSpec(f"{module}.gate.e_score_correction_bias", (experts.count,), Role.WIDE, None, corrected)
    if latent:
        first, last = f"{gguf}.ffn_latent_down", f"{gguf}.ffn_latent_up"
        yield from linear(f"{module}.fc1_latent_proj", (latent, hidden), gguf=first, bias=config.mlp_bias)
        yield from linear(f"{module}.fc2_latent_proj", (hidden, latent), gguf=last, bias=config.mlp_bias)
    inner, width = experts.inner, latent or hidden
    for expert in range(experts.count):
        for name, shape, split, role in (
            ("up_proj", (inner, width), by_outputs((inner, inner)), Role.PROJECTION),
            ("down_proj", (width, inner), by_inputs(inner, inner), Role.DOWN),
        ):
            place = f"{gguf}.ffn_{name.removesuffix('_proj')}_exps.weight"
            stacked = StackedExpert(expert, experts.count, f"{module}.experts.{name}", gguf=place)
            weight = f"{module}.experts.{expert}.{name}.weight"
            yield TensorSpec(weight, shape, role, split, stacked=stacked)
    if experts.shared:
        yield from _plain_tensors(config, f"{module}.shared_experts", f"{gguf}.ffn", experts.shared, "_shexp")


def head_config(raw: Mapping[str, Any], target: ModelConfig, name: str) -> ModelConfig:
    """The sizes of a head for later tokens, which counts as one layer. Raises ConfigError."""
    given = raw.get("mtp_layers_block_type") or raw.get("mtp_hybrid_override_pattern") or "*E"
    if given not in ("*E", ["attention", "moe"], ["full_attention", "moe"]) or target.experts is None:
        raise ConfigError(
            f"config.json: mtp_layers_block_type must be attention and moe, and is {given!r}; use "
            "--speculative-algorithm NGRAM"
        )
    experts = dataclasses.replace(target.experts, layers=frozenset((0,)))
    return dataclasses.replace(target, layers=1, windows=(0,), experts=experts, recurrent=frozenset())


def head_tensors(config: ModelConfig, name: str) -> Iterator[TensorSpec]:
    """The tensors of the layers of a head for later tokens. ``name``: of the first."""
    second = _after(name)
    yield norm(f"{name}.norm", config.hidden_size)
    yield from gqa.interleaved_tensors(config, f"{name}.mixer", "")
    yield norm(f"{second}.norm", config.hidden_size)
    yield from _expert_tensors(config, f"{second}.mixer", "")


def head_layer(config: ModelConfig, builder: LayerBuilder, name: str) -> Block:
    """The layers of ``head_tensors``, on one rank."""
    second = _after(name)
    norms = Norms(
        before_attention=builder.norm(f"{name}.norm", config.norm_eps),
        before_mlp=builder.norm(f"{second}.norm", config.norm_eps),
    )
    experts = _Experts(builder, config, f"{second}.mixer")
    return Block(builder, config, attention(builder, config, f"{name}.mixer", 0), experts, norms)


def _after(name: str) -> str:
    module, _, number = name.rpartition(".")
    return f"{module}.{int(number) + 1}"


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """Keys and values of the layers with attention, states of those with Mamba; the others keep nothing."""
    kinds = _sizes(config).kinds
    groups = (
        CacheGroup(group.spec, tuple(layer for layer in group.layers if kinds[layer] == "attention"))
        for group in gqa.caches(config)
    )
    return (*(group for group in groups if group.layers), *recurrent.caches(config))


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config, "backbone.embeddings")
    layers = [
        _Layer(builder, config, f"backbone.layers.{index}", kind) for index, kind in enumerate(_sizes(config).kinds)
    ]
    return Decoder(builder, config, vocab, layers, builder.norm("backbone.norm_f", config.norm_eps))


class _Layer:
    """A norm and what reads it, of the ``kind``."""

    def __init__(self, builder: LayerBuilder, config: ModelConfig, name: str, kind: str) -> None:
        self.norm, module = builder.norm(f"{name}.norm", config.norm_eps), f"{name}.mixer"
        self.rows = builder.rows
        self.mixer: AttentionLayer | None = None
        if kind == "mamba":
            self.mixer = Mamba(builder, config, module)
        elif kind == "attention":
            self.mixer = attention(builder, config, module, 0)
        elif kind == "mlp":
            self.feed_forward: Linear = plain_mlp(builder, config, f"{module}.up_proj", f"{module}.down_proj")
        else:
            self.feed_forward = _Experts(builder, config, module)

    @property
    def first_norm(self) -> Norm:
        """The norm that reads the residual stream first."""
        return self.norm

    def set_next_norm(self, norm: Norm) -> None:
        """Nothing: no product of this layer is fused with the norm after it."""

    def __call__(
        self,
        x: PendingResidual,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: Any,
        batch: ForwardBatch,
        wanted: Tensor | None = None,
    ) -> tuple[PendingResidual, Tensor]:
        """As ``DecoderLayer``."""
        normed, residual = norm_of_sum(self.norm, x, residual)
        if wanted is not None:
            residual = residual.index_select(0, wanted)
        if self.mixer is not None:
            return self.mixer(normed, cos, sin, cache, batch, wanted), residual
        if wanted is not None:
            if self.rows is not None:
                self.rows.select(wanted)
            normed = normed.index_select(0, wanted)
        return self.feed_forward(normed), residual


class _Experts:
    """``back(sum(weight[e] * down[e](relu(up[e](to(x)))^2))) + shared(x)`` over the experts e that a token takes. Each
    rank has its part of every expert's inner dimension."""

    def __init__(self, builder: LayerBuilder, config: ModelConfig, module: str) -> None:
        sizes, source, ops = config.experts, builder.source, builder.ops
        assert sizes is not None
        self.mesh, self._routes = builder.mesh, builder.routes
        experts = []
        modules = [
            (f"{module}.experts.{expert}.up_proj", f"{module}.experts.{expert}.down_proj")
            for expert in range(sizes.count)
        ]
        named = ExpertModules(f"{module}.experts", modules, range(sizes.count), router=f"{module}.gate")
        adapted = moe.adapted_experts(builder, named)
        for up, down in modules:
            experts.append(ExpertWeights(source.projection([up]), None, source.projection([down]), None))
        correction = source.take([f"{module}.gate.e_score_correction_bias"])
        routing = Routing(
            sizes.chosen,
            sizes.normalized,
            sizes.scores,
            sizes.groups,
            sizes.top_groups,
            sizes.pair_sum,
            sizes.scale,
            correction,
        )
        router = ops.experts.make_router(source.take([f"{module}.gate.weight"]), None, routing)
        router = moe.adapted_router(builder, router, adapted)
        self.experts = ops.experts.make_in_turn(
            router, experts, routing, "they have no gates", ACTIVATIONS["relu2"], adapted=adapted
        )
        self.ends: tuple[Linear, Linear] | None = None
        if _sizes(config).latent:
            self.ends = builder.linear(f"{module}.fc1_latent_proj"), builder.linear(f"{module}.fc2_latent_proj")
        self.shared: Linear | None = None
        if sizes.shared:
            shared = f"{module}.shared_experts"
            self.shared = plain_mlp(builder, config, f"{shared}.up_proj", f"{shared}.down_proj")

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        if self._routes.is_open:
            self._routes.add(self.experts.choose(x))
        result = self.experts.run(x if self.ends is None else self.ends[0](x), self.experts.router(x))
        if self.mesh.size > 1:
            result = self.mesh.all_reduce(result)
        if self.ends is not None:
            result = self.ends[1](result)
        return result if self.shared is None else result + self.shared(x)
