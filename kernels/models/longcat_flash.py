"""LongCat-Flash (Meituan, arXiv 2509.01322): a layer has two blocks of latent attention and a feed-forward layer. Its
experts read what the first feed-forward layer reads, and are added after the second one. Some return their input.

    h = h + attention[0](norm(h));  n = norm(h);  e = experts(n);  h = h + mlps[0](n)
    h = h + attention[1](norm(h));  h = h + mlps[1](norm(h)) + e

Each of the two blocks is a layer of the decoder here, with a cache of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from kernels.contract.errors import ConfigError
from kernels.core.batch import ForwardBatch
from kernels.core.operators import Norm, PendingResidual
from kernels.devices.linear import norm_of_sum
from kernels.distributed.turns import PassValue
from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder, DecoderLayer
from kernels.models.layers import mla, mlp, moe, pre_norm, vocabulary
from kernels.models.layers.block import Block, Norms, gated_mlp
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.models.layers.moe import ExpertNames
from kernels.weights.tensors import TensorSpec, norm

__all__ = ["build", "caches", "config", "head_config", "head_layer", "head_tensors", "tensors"]

_NAMES = ExpertNames(
    "mlp", "gate_proj", "up_proj", "down_proj", router="router.classifier", correction="router.e_score_correction_bias"
)

caches = mla.caches


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    layers = raw.raw.get("num_layers")
    given = {
        "num_hidden_layers": 2 * layers if type(layers) is int else raw.raw.get("num_hidden_layers"),
        "num_experts_per_tok": raw.raw.get("moe_topk", raw.raw.get("num_experts_per_tok")),
        "intermediate_size": raw.raw.get("ffn_hidden_size", raw.raw.get("intermediate_size")),
        "moe_intermediate_size": raw.raw.get("expert_ffn_hidden_size", raw.raw.get("moe_intermediate_size")),
        "rope_theta": raw.raw.get("rope_theta", 10000000.0),
    }
    if raw.flag("router_bias"):
        raise ConfigError("router_bias is not supported; use a model without it")
    if raw.raw.get("zero_expert_type") not in (None, "identity"):
        raise ConfigError(f"zero_expert_type {raw.raw['zero_expert_type']!r} is not supported; identity is")
    raw = ConfigReader({**raw.raw, **given}, raw.architecture)
    count, chosen = (
        ConfigReader({**raw.raw, "num_experts_per_tok": 1}, raw.architecture).expert_counts()[0],
        raw.size("num_experts_per_tok"),
    )
    identities = 0 if raw.raw.get("zero_expert_num") in (None, 0) else raw.size("zero_expert_num")
    experts = ExpertsConfig(
        frozenset(range(0, raw.layers, 2)),
        count,
        chosen,
        raw.size("moe_intermediate_size"),
        normalized=False,
        scale=raw.number("routed_scaling_factor", 6.0),
        corrected=True,
        identities=identities,
    )
    plain = raw.latent_decoder(experts=experts, eps=1e-5)
    latent, hidden = plain.latent, plain.hidden_size
    assert latent is not None
    query = (hidden / latent.query_rank) ** 0.5 if latent.query_rank and raw.flag("mla_scale_q_lora", True) else 1.0
    factor = (hidden / latent.rank) ** 0.5 if raw.flag("mla_scale_kv_lora", True) else 1.0
    return dataclasses.replace(
        plain,
        latent=dataclasses.replace(latent, factor=factor),
        attention_scale=plain.attention_scale * query,
        output_bias=raw.flag("attention_bias"),
    )


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    experts = config.experts
    assert experts is not None
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer, half = f"model.layers.{index // 2}", index % 2
        yield norm(f"{layer}.input_layernorm.{half}", config.hidden_size)
        yield norm(f"{layer}.post_attention_layernorm.{half}", config.hidden_size)
        yield from mla.tensors(config, f"{layer}.self_attn.{half}", "")
        yield from mlp.tensors(config, f"{layer}.mlps.{half}", "")
        if not half:
            yield from _expert_tensors(experts, config.hidden_size, layer)
    yield norm("model.norm", config.hidden_size)


def head_config(raw: Mapping[str, Any], target: ModelConfig, name: str) -> ModelConfig:
    """The sizes of a head for later tokens, a model of one layer without experts."""
    return dataclasses.replace(target, layers=1, windows=(0,), experts=None)


def head_tensors(config: ModelConfig, name: str) -> Iterator[TensorSpec]:
    """The tensors of the layer of a head for later tokens."""
    yield from pre_norm.norm_tensors(config, name, "")
    yield from mla.tensors(config, f"{name}.self_attn", "")
    yield from mlp.tensors(config, f"{name}.transformer_layer.mlp", "")


def head_layer(config: ModelConfig, builder: LayerBuilder, name: str) -> Block:
    """The layer of ``head_tensors``, on one rank."""
    norms = Norms(
        before_attention=builder.norm(f"{name}.input_layernorm", config.norm_eps),
        before_mlp=builder.norm(f"{name}.post_attention_layernorm", config.norm_eps),
    )
    attention = mla.attention(builder, config, f"{name}.self_attn", 0)
    return Block(builder, config, attention, gated_mlp(builder, config, f"{name}.transformer_layer.mlp"), norms)


def _expert_tensors(experts: ExpertsConfig, hidden: int, layer: str) -> Iterator[TensorSpec]:
    """Files may hold weights of experts that return their input."""
    router, *others = moe.tensors(experts, hidden, layer, "", _NAMES)
    unread = tuple(
        f"{layer}.mlp.experts.{experts.count + one}.{part}.weight"
        for one in range(experts.identities)
        for part in ("gate_proj", "up_proj", "down_proj")
    )
    yield dataclasses.replace(router, unread=unread)
    yield from others


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config)
    layers: list[DecoderLayer] = []
    for index in range(config.layers // 2):
        first = _FirstHalf(config, builder, f"model.layers.{index}")
        layers += [first, _Half(config, builder, f"model.layers.{index}", 1, first)]
    return Decoder(builder, config, vocab, layers, builder.norm("model.norm", config.norm_eps))


class _Half:
    """A block of a layer. ``first``: the one before it, whose experts' result it adds."""

    def __init__(
        self, config: ModelConfig, builder: LayerBuilder, name: str, half: int, first: _FirstHalf | None = None
    ) -> None:
        eps, self.first = config.norm_eps, first
        self.before = builder.norm(f"{name}.input_layernorm.{half}", eps)
        self.after = builder.norm(f"{name}.post_attention_layernorm.{half}", eps)
        self.attention = mla.attention(builder, config, f"{name}.self_attn.{half}", 0)
        self.mlp = gated_mlp(builder, config, f"{name}.mlps.{half}")
        self.without_program = builder.ops.elementwise.without_program()

    @property
    def first_norm(self) -> Norm | None:
        """The norm that reads the residual stream first."""
        return self.before

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
        normed, residual = norm_of_sum(self.before, x, residual)
        result = self.attention(self.without_program(normed), cos, sin, cache, batch, wanted)
        if wanted is not None:
            residual = residual.index_select(0, wanted)
        normed, residual = self.after.add(result, residual)
        return self.feed_forward(normed, wanted), residual

    def feed_forward(self, normed: Tensor, wanted: Tensor | None) -> Tensor:
        """What the block adds at its end."""
        assert self.first is not None
        experts = self.first.result.value
        assert experts is not None
        return self.mlp(normed) + (experts if wanted is None else experts.index_select(0, wanted))


class _FirstHalf(_Half):
    """The first block of a layer. ``result``: of its experts, in the pass that runs."""

    def __init__(self, config: ModelConfig, builder: LayerBuilder, name: str) -> None:
        super().__init__(config, builder, name, 0)
        assert config.experts is not None
        self.experts, self.result = moe.SparseFeedForward(builder, config.experts, name, _NAMES), PassValue()

    def feed_forward(self, normed: Tensor, wanted: Tensor | None) -> Tensor:
        """What the block adds at its end."""
        self.result.value = self.experts(normed)
        return self.mlp(normed)
