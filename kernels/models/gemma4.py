"""Gemma 4, its language model (Google DeepMind, https://ai.google.dev/gemma/docs/core): Gemma 3's order of norms, whose
layers with full attention have heads of another size and rotate a part of them.

    h = h + norm(attention(norm(h)));  h = h + norm(mlp(norm(h)))
    with embeddings of each layer:  h = h + norm(project(gelu(gate(h)) * embedding))
    h = scalar * h

Values are normed without weights; in full attention they may be the keys before their norm. The last layers may read
the cache of the last one of their kind before them. Experts may stand beside each feed-forward layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contract.caches import CacheGroup, Paged, Window
from kernels.contract.errors import ConfigError
from kernels.core.batch import ForwardBatch
from kernels.core.layer_context import Delta
from kernels.core.operators import Linear, Norm, PendingResidual
from kernels.devices.experts import Experts, ExpertWeights, Routing
from kernels.devices.linear import norm_of_sum
from kernels.distributed.turns import PassValue
from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, mlp, moe, vocabulary
from kernels.models.layers.block import AttentionLayer, SelfAttention, gated_mlp
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.models.layers.moe import gelu_and_mul
from kernels.models.layers.vocabulary import VocabularyEmbedding
from kernels.weights.tensors import GgufPlace, Role, Split, TensorSpec, embedding, linear, norm

__all__ = ["build", "caches", "config", "tensors"]

_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""Before and after attention, before and after the feed-forward layer, and their names in GGUF files."""
_EXPERT_NORMS = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
"""After the feed-forward layer, before and after the experts beside it."""


@dataclass(frozen=True)
class Gemma4Config(ModelConfig):
    """``heads``, ``head_dim`` and ``kv_heads`` are those of layers with a window. ``full_dim``, ``full_kv_heads``: of
    the others, of the whole model. ``all_heads``: the whole model's. ``equal``: in the others, keys are values.
    ``input_size``: of each layer's embeddings, 0: there are none; ``input_vocab``: rows of their table. ``wide``:
    feed-forward layers are twice as large where the cache is another layer's.
    """

    full_dim: int = 0
    full_kv_heads: int = 0
    all_heads: int = 0
    equal: bool = False
    input_size: int = 0
    input_vocab: int = 0
    wide: bool = False

    @property
    def attention_features(self) -> Mapping[str, str]:
        """As ``ModelConfig``."""
        features = dict(super().attention_features)
        if self.mixed:
            features["sizes"] = "attention with heads of two sizes"
        if self.full_dim > 256:
            features["wide"] = "heads of more than 256 numbers"
        return features

    @property
    def mixed(self) -> bool:
        return (self.full_dim, self.full_kv_heads) != (self.head_dim, self.global_kv_heads or self.kv_heads)

    def layer(self, index: int) -> ModelConfig:
        """The sizes of a layer, on this rank if the others are."""
        wide = self.intermediate_size * (2 if self.wide and index in self.shared_caches else 1)
        if self.windows[index]:
            return dataclasses.replace(self, intermediate_size=wide)
        kv_heads = max(1, self.full_kv_heads * self.heads // self.all_heads)
        return dataclasses.replace(self, intermediate_size=wide, head_dim=self.full_dim, kv_heads=kv_heads)


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    if raw.raw.get("use_bidirectional_attention") == "all":
        raise ConfigError("use_bidirectional_attention is for embeddings; use a model that generates text")
    bias, windows = raw.flag("attention_bias"), _windows(raw)
    ropes = raw.raw.get("rope_parameters") or {}
    local = ropes.get("sliding_attention") if isinstance(ropes, dict) else None
    plain = ConfigReader({**raw.raw, "rope_parameters": local}, raw.architecture).decoder(
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        windows=windows,
        experts=_experts_config(raw),
        activation="gelu_tanh",
        head_dim=256,
        tied=True,
    )
    full, equal, vocab = _full_sizes(raw, windows), raw.flag("attention_k_eq_v"), "vocab_size_per_layer_input"
    rope = raw.proportional_rope(full.size("head_dim", 512), 0.25)
    inputs = 0 if raw.raw.get("hidden_size_per_layer_input", 256) in (0, None) else 256
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    result = Gemma4Config(
        **fields
        | {
            "ropes": {layer: rope for layer, window in enumerate(windows) if not window},
            "embedding_scale": plain.hidden_size**0.5,
            "attention_scale": 1.0,
            "logit_softcap": raw.number("final_logit_softcapping", 0.0),
            "shared_caches": _shared_caches(raw, windows),
        },
        full_dim=rope.head_dim,
        full_kv_heads=full.size("num_key_value_heads", plain.kv_heads),
        all_heads=plain.heads,
        equal=equal,
        input_size=raw.size("hidden_size_per_layer_input", inputs) if inputs else 0,
        input_vocab=raw.size(vocab, plain.vocab_size) if inputs else 0,
        wide=raw.flag("use_double_wide_mlp"),
    )
    if plain.heads % result.full_kv_heads:
        raise ConfigError(
            f"num_attention_heads {plain.heads} is not a multiple of num_global_key_value_heads {result.full_kv_heads}"
        )
    return result


def _windows(raw: ConfigReader) -> tuple[int, ...]:
    """``sliding_window`` of all layers but every sixth, or by ``layer_types``; the last layer sees all tokens."""
    given = ConfigReader({"sliding_window": 512, **raw.raw}, raw.architecture)
    return (*given.patterned_windows(6)[:-1], 0)


def _full_sizes(raw: ConfigReader, windows: tuple[int, ...]) -> ConfigReader:
    """``head_dim`` and ``num_key_value_heads`` of layers with full attention: ``global_head_dim`` and
    ``num_global_key_value_heads``, or by ``per_layer_config``, which must have the same ones for all of them."""
    given = raw.raw.get("per_layer_config")
    if given is None:
        heads = raw.raw.get("num_global_key_value_heads") if raw.flag("attention_k_eq_v") else None
        return ConfigReader(
            {"head_dim": raw.raw.get("global_head_dim"), "num_key_value_heads": heads}, raw.architecture
        )
    full = {str(layer) for layer, window in enumerate(windows) if not window}
    if not isinstance(given, dict) or set(given) != full or len({repr(part) for part in given.values()}) != 1:
        raise ConfigError(
            "config.json: per_layer_config must say the same of each layer with full attention, and no other"
        )
    part = next(iter(given.values()))
    if not isinstance(part, dict):
        raise ConfigError(f"config.json: per_layer_config must have objects, and has {part!r}")
    return ConfigReader(part, raw.architecture)


def _shared_caches(raw: ConfigReader, windows: tuple[int, ...]) -> dict[int, int]:
    """Of the last ``num_kv_shared_layers``: the last layer of the same kind before them."""
    count, layers = raw.raw.get("num_kv_shared_layers", 0), raw.layers
    count = 0 if count is None else count
    if type(count) is not int or not 0 <= count < layers:
        raise ConfigError(f"config.json: num_kv_shared_layers must be less than {layers} layers, and is {count!r}")
    first, last = layers - count, {bool(window): layer for layer, window in enumerate(windows[: layers - count])}
    missing = [layer for layer in range(first, layers) if bool(windows[layer]) not in last]
    if missing:
        raise ConfigError(
            f"config.json: num_kv_shared_layers {count} leaves no layer whose cache layer {missing[0]} reads"
        )
    return {layer: last[bool(windows[layer])] for layer in range(first, layers)}


def _experts_config(raw: ConfigReader) -> ExpertsConfig | None:
    if not raw.flag("enable_moe_block"):
        return None
    given = {"num_experts_per_tok": raw.raw.get("top_k_experts")}
    count, chosen = ConfigReader({**raw.raw, **given}, raw.architecture).expert_counts()
    inner = raw.size("moe_intermediate_size")
    layers, apart = frozenset(range(raw.layers)), raw.flag("experts_apart")
    return ExpertsConfig(layers, count, chosen, inner, normalized=True, apart=apart)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    assert isinstance(config, Gemma4Config)
    hidden, size = config.hidden_size, config.input_size
    yield from vocabulary.tensors(config)
    if size:
        table, width = "model.embed_tokens_per_layer", config.layers * size
        yield embedding(table, config.input_vocab, width, "per_layer_token_embd")
        yield from linear("model.per_layer_model_projection", (width, hidden), gguf="per_layer_model_proj")
        yield norm("model.per_layer_projection_norm", size, "per_layer_proj_norm")
    for index in range(config.layers):
        layer, gguf, own = f"model.layers.{index}", f"blk.{index}", config.layer(index)
        yield from _attention_tensors(config, own, f"{layer}.self_attn", index)
        yield from mlp.tensors(own, f"{layer}.mlp", f"{gguf}.ffn")
        for name, place in _NORMS.items():
            yield norm(f"{layer}.{name}", hidden, f"{gguf}.{place}")
        scalar = GgufPlace(f"{gguf}.layer_output_scale.weight")
        yield TensorSpec(f"{layer}.layer_scalar", (1,), Role.WIDE, None, scalar)
        if size:
            yield from linear(f"{layer}.per_layer_input_gate", (size, hidden), gguf=f"{gguf}.inp_gate")
            yield from linear(f"{layer}.per_layer_projection", (hidden, size), gguf=f"{gguf}.proj")
            yield norm(f"{layer}.post_per_layer_input_norm", hidden, f"{gguf}.post_norm")
        if config.experts is not None:
            yield from _expert_tensors(config.experts, hidden, layer, gguf)
    yield norm("model.norm", hidden, "output_norm")


def _attention_tensors(config: Gemma4Config, own: ModelConfig, module: str, index: int) -> Iterator[TensorSpec]:
    left = set[str]()
    if index in config.shared_caches:
        left = {"k_proj", "v_proj", "k_norm"}
    elif config.equal and not config.windows[index]:
        left = {"v_proj"}
    specs = list(gqa.tensors(own, module, f"blk.{index}.attn"))
    unread = [spec.name for spec in specs if spec.module.removeprefix(f"{module}.") in left]
    for spec in specs:  # checkpoints may hold what they do not use
        if spec.name not in unread:
            yield dataclasses.replace(spec, unread=tuple(unread)) if "q_proj" in spec.name else spec


def _expert_tensors(experts: ExpertsConfig, hidden: int, layer: str, gguf: str) -> Iterator[TensorSpec]:
    count, inner = experts.count, experts.inner
    for name in _EXPERT_NORMS:
        place = name.replace("feedforward_layernorm", "ffw_norm")
        yield norm(f"{layer}.{name}", hidden, f"{gguf}.{place}")
    yield from linear(f"{layer}.router.proj", (count, hidden), gguf=f"{gguf}.ffn_gate_inp", role=Role.ROUTER)
    scale = GgufPlace(f"{gguf}.ffn_gate_inp.scale")
    yield TensorSpec(f"{layer}.router.scale", (hidden,), Role.WIDE, None, scale)
    scale = GgufPlace(f"{gguf}.ffn_down_exps.scale")
    yield TensorSpec(f"{layer}.router.per_expert_scale", (count,), Role.WIDE, None, scale)
    if experts.apart:
        yield from moe.expert_tensors(experts, hidden, f"{layer}.experts", gguf)
        return
    halves = Split(1, ((inner, inner), (inner, inner)))
    yield TensorSpec(f"{layer}.experts.gate_up_proj", (count, 2 * inner, hidden), Role.EXPERTS, halves)
    yield TensorSpec(f"{layer}.experts.down_proj", (count, hidden, inner), Role.EXPERTS, Split(2, ((inner, inner),)))


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """Keys and values of all tokens, or of a window. Windows come last: a device plans attention for the heads of the
    group that a family names last (CONTRIBUTING, "Add a model")."""
    assert isinstance(config, Gemma4Config)
    groups: dict[Paged | Window, list[int]] = {}
    for index, window in sorted(enumerate(config.windows), key=lambda layer: bool(layer[1])):
        if index not in config.shared_caches:
            own = config.layer(index)
            paged = Paged(own.kv_heads, own.head_dim, own.head_dim)
            groups.setdefault(Window(paged, window) if window else paged, []).append(index)
    return tuple(CacheGroup(spec, tuple(layers)) for spec, layers in groups.items())


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    assert isinstance(config, Gemma4Config)
    vocab = vocabulary.vocabulary(builder, config)
    inputs = _LayerInputs(config, builder) if config.input_size else None
    layers = [_Layer(config, builder, index, inputs) for index in range(config.layers)]
    return Decoder(builder, config, vocab, layers, builder.norm("model.norm", config.norm_eps))


def _ones_norm(config: ModelConfig, builder: ModelBuilder, *shape: int) -> Norm:
    """A norm without weights."""
    ones = torch.ones(shape, dtype=builder.dtype, device=builder.ops.torch_device)
    return builder.ops.elementwise.make_norm(ones, config.norm_eps)


def _attention(config: Gemma4Config, builder: ModelBuilder, module: str, index: int) -> AttentionLayer:
    own, window = config.layer(index), config.windows[index]
    output = builder.row_parallel(f"{module}.o_proj")
    plain = config.mixed and not window and "sizes" not in builder.ops.attention.plans
    if index in config.shared_caches:
        return _SharedAttention(own, builder, module, output, window, plain=plain)
    names, counts = (f"{module}.q_norm", f"{module}.k_norm"), (own.heads, own.kv_heads)
    normed, rotated, equal = (
        _ones_norm(config, builder, own.head_dim),
        own.heads + own.kv_heads,
        config.equal and not window,
    )
    parts = ("q_proj", "k_proj") if equal else ("q_proj", "k_proj", "v_proj")
    projection = builder.linear(*(f"{module}.{part}" for part in parts))

    def qkv(x: Tensor) -> Tensor:
        heads = projection(x).view(len(x), -1, own.head_dim)
        values = normed(heads[:, -own.kv_heads :].contiguous())
        return torch.cat((heads[:, :rotated], values), 1).flatten(1)

    norm = builder.head_norms(*names, *counts, config.norm_eps)
    return SelfAttention(builder, own, qkv, output, window, norm=norm, plain=plain)


class _SharedAttention:
    """Attention of a layer's queries over the cache of another layer."""

    def __init__(
        self, own: ModelConfig, builder: LayerBuilder, module: str, output: Linear, window: int, *, plain: bool
    ) -> None:
        self.attention, self.rows, self.output = builder.ops.attention, builder.rows, output
        self.queries, self.norm = builder.linear(f"{module}.q_proj"), builder.norm(f"{module}.q_norm", own.norm_eps)
        self.shape, self.window, self.plain, self.scale = (own.heads, own.head_dim), window, plain, own.attention_scale

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Any, batch: ForwardBatch, wanted: Tensor | None
    ) -> Tensor:
        """As ``AttentionLayer``."""
        heads = self.norm(self.queries(x).view(len(x), *self.shape))
        queries = torch.empty_like(heads)
        self.attention.rotate(heads, cos, sin, out=queries)
        if self.plain:
            assert batch.rows is not None, "such attention is part of no captured pass"
            result = self.attention.attend_rows(queries, cache, batch.rows, self.window, self.scale, 0.0)
        else:
            result = self.attention.attend(queries, cache, batch.plans[self.window], self.scale)
        if wanted is not None:
            if self.rows is not None:
                self.rows.select(wanted)
            result = result.index_select(0, wanted)
        return self.output(result)


class _LayerInputs:
    """The embeddings of each layer: ``(norm(project(h) / sqrt(hidden)) + sqrt(size) * table[id]) / sqrt(2)``."""

    def __init__(self, config: Gemma4Config, builder: ModelBuilder) -> None:
        self.layers, self.size, self.factor = config.layers, config.input_size, config.hidden_size**-0.5
        table = builder.source.table("model.embed_tokens_per_layer")
        self.table = VocabularyEmbedding(builder.mesh, builder.ops.linear.make_lookup(table), table.shape[0])
        self.scale = torch.tensor(config.input_size**0.5, dtype=builder.dtype).item()  # as the model was trained
        self.project = builder.linear("model.per_layer_model_projection")
        self.norm = builder.norm("model.per_layer_projection_norm", config.norm_eps)
        self.values = PassValue()

    def compute(self, hidden: Tensor, ids: Tensor) -> None:
        """Those of all layers. ``hidden`` [tokens, hidden]: the embeddings of the tokens ``ids``."""
        shape = len(ids), self.layers, self.size
        own = self.norm((self.project(hidden) * self.factor).view(shape))
        self.values.value = (own + (self.table(ids) * self.scale).view(shape)) * 2**-0.5


class _Layer:
    """A layer. ``inputs``: its own embeddings, which the first layer computes."""

    def __init__(self, config: Gemma4Config, builder: ModelBuilder, index: int, inputs: _LayerInputs | None) -> None:
        name, eps = f"model.layers.{index}", config.norm_eps
        self.index, self.inputs, self.elementwise = index, inputs, builder.ops.elementwise
        self.without_program = self.elementwise.without_program()
        self.norms = [builder.norm(f"{name}.{norm}", eps) for norm in _NORMS]
        self.attention = _attention(config, builder, f"{name}.self_attn", index)
        self.mlp = gated_mlp(builder, config, f"{name}.mlp")
        self.experts = _ExpertsBeside(config, builder, name) if config.experts is not None else None
        self.scalar = float(builder.source.take([f"{name}.layer_scalar"]))
        if inputs is not None:
            self.gate, self.project = (
                builder.linear(f"{name}.per_layer_input_gate"),
                builder.linear(f"{name}.per_layer_projection"),
            )
            self.input_norm = builder.norm(f"{name}.post_per_layer_input_norm", eps)

    @property
    def first_norm(self) -> Norm | None:
        """The norm that reads the residual stream first."""
        return self.norms[0]

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
        first, second, third, fourth = self.norms
        if self.inputs is not None and self.index == 0:
            self.inputs.compute(residual, batch.token_ids)
        normed, residual = norm_of_sum(first, x, residual)
        result = self.attention(self.without_program(normed), cos, sin, cache, batch, wanted)
        if wanted is not None:
            residual = residual.index_select(0, wanted)
        residual = residual + second(result)
        result = self.mlp(third(residual))
        if self.experts is not None:
            result = self.experts(result, residual)
        residual = residual + fourth(result)
        inputs = None if self.inputs is None else self.inputs.values.value
        if inputs is not None:
            own = inputs[:, self.index]
            own = own if wanted is None else own.index_select(0, wanted)
            gated = F.gelu(self.gate(residual), approximate="tanh") * own
            residual = residual + self.input_norm(self.project(gated))
        return None, residual * self.scalar


class _ExpertsBeside:
    """``norm(mlp) + norm(experts(norm(h)))``. The router reads a norm without weights: so do the experts here, and the
    weights of theirs are part of their own. So are the factors of their results."""

    def __init__(self, config: Gemma4Config, builder: ModelBuilder, name: str) -> None:
        self.after_mlp, self.after = (builder.norm(f"{name}.{_EXPERT_NORMS[part]}", config.norm_eps) for part in (0, 2))
        self.norm, self.routes, self.group = (
            _ones_norm(config, builder, config.hidden_size),
            builder.routes,
            builder.mesh,
        )
        self.experts = self._experts(config, builder, name)

    def _experts(self, config: Gemma4Config, builder: ModelBuilder, name: str) -> Experts:
        sizes, take = config.experts, builder.source.take
        assert sizes is not None
        both, down = f"{name}.experts.gate_up_proj", f"{name}.experts.down_proj"
        adapted = moe.stacked_adapters(builder, sizes, config.hidden_size, f"{name}.experts")
        weights, router = take([f"{name}.{_EXPERT_NORMS[1]}.weight"]).float(), take([f"{name}.router.proj.weight"])
        factors = take([f"{name}.router.per_expert_scale"]).tolist()
        scale = take([f"{name}.router.scale"]).float() * config.hidden_size**-0.5
        firsts: Iterable[Tensor]
        lasts: Iterable[Tensor]
        if sizes.apart:
            names = [f"{name}.experts.{expert}" for expert in range(sizes.count)]
            firsts = (take([f"{own}.gate_proj.weight", f"{own}.up_proj.weight"]) for own in names)
            lasts = (take([f"{own}.down_proj.weight"]) for own in names)
        else:
            firsts, lasts = take([both]), take([down])
        experts = [
            ExpertWeights((first.float() * weights).to(first.dtype), None, (last.float() * factor).to(last.dtype), None)
            for first, last, factor in zip(firsts, lasts, factors, strict=True)
        ]
        layers, routing = builder.ops.experts, Routing(sizes.chosen, normalized=True)
        made = layers.make_router((router.float() * scale).to(router.dtype), None, routing)
        if adapted is None:
            return layers.make_routed(made, experts, routing, gelu_and_mul)
        deltas = [
            (_of_scaled(first, weights.to(builder.dtype)), _of_scaled(last, factor))
            for (first, last), factor in zip(adapted.deltas, factors, strict=True)
        ]
        adapted = dataclasses.replace(adapted, deltas=deltas)
        return layers.make_in_turn(made, experts, routing, moe.ADAPTED, gelu_and_mul, adapted=adapted)

    def __call__(self, result: Tensor, residual: Tensor) -> Tensor:
        """``result`` [tokens, hidden]: the feed-forward layer's."""
        normed = self.norm(residual)
        if self.routes.is_open:
            self.routes.add(self.experts.choose(normed))
        chosen = self.experts(normed)
        chosen = chosen if self.group.size == 1 else self.group.all_reduce(chosen)
        return self.after_mlp(result) + self.after(chosen)


def _of_scaled(delta: Delta, scale: Tensor | float) -> Delta:
    """What adapters add where the inputs are scaled, of which the layer's own weights are a part."""
    return lambda x, outputs: delta(x * scale, outputs)
