"""HunYuan V4 (Tencent, https://huggingface.co/tencent/Hy4-preview): DeepSeek V3.2's sparse latent attention, whose
heads have sinks and whose results are gated, between several residual streams (``StreamBlock``).

The routed experts' inner activations are limited, logits are computed in float32. In models that also read images
neighbors of a head rotate against one another, in the others halves.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kernels.contract.caches import CacheGroup
from kernels.contract.errors import ConfigError
from kernels.core.operators import Linear
from kernels.models import deepseek_v32
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import (
    constrained_connections,
    independent_connections,
    indexer,
    mla,
    mlp,
    moe,
    sparse,
    vocabulary,
)
from kernels.models.layers.block import gated_mlp
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.models.layers.constrained_connections import HyperHead, StreamConfig
from kernels.models.layers.gated_attention import ApartGates
from kernels.models.layers.independent_connections import IndependentConnection
from kernels.models.layers.indexer import Indexer
from kernels.models.layers.moe import DEEPSEEK, LimitedGate
from kernels.models.layers.stream_block import StreamBlock, StreamHalf
from kernels.weights.tensors import TensorSpec, by_outputs, linear, norm

__all__ = ["HunyuanV4Config", "build", "caches", "config", "tensors"]

_DEFAULTS: dict[str, Any] = {
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 2048,
}


@dataclass(frozen=True)
class HunyuanV4Config(ModelConfig):
    """``streams``: of the residual. ``magnitude``: as ``IndependentConnection``. ``limit``: as ``LimitedGate``, of the
    routed experts; 0: none."""

    streams: StreamConfig | None = None
    magnitude: float = 2.0
    limit: float = 0.0

    @property
    def stream_size(self) -> int:
        """As ``ModelConfig``."""
        return _streams(self).count * self.hidden_size


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    seeing = raw.raw.get("model_type") == "hy_v4_vl_text"
    own: dict[str, Any] = {"rope_interleave": seeing, "indexer_rope_interleave": seeing}
    if raw.raw.get("indexer_types") is None:
        own["indexer_types"] = ["full" if layer == 0 or layer % 4 == 1 else "shared" for layer in range(raw.layers)]
    limit = _limit(raw)
    raw = ConfigReader({**_DEFAULTS, **raw.raw, **own}, raw.architecture)
    experts = raw.deepseek_experts(raw.later_layers(1), "sigmoid", pair_sum=True)
    plain = raw.indexed_decoder(experts=dataclasses.replace(experts, wide_router=True), eps=1e-5)
    latent, index = deepseek_v32.sizes(plain)
    index = dataclasses.replace(index, rotates_last=True, norm_eps=plain.norm_eps)
    latent = dataclasses.replace(latent, index=index, norm_eps=plain.norm_eps if seeing else latent.norm_eps)
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    return HunyuanV4Config(
        **fields | {"latent": latent, "sinks": True},
        streams=StreamConfig(raw.size("hc_mult", 4), 0, raw.number("hc_eps", 1e-6), plain.norm_eps),
        magnitude=raw.number("hc_magnitude", 2.0),
        limit=limit,
    )


def _limit(raw: ConfigReader) -> float:
    """``swiglu_limit``; those that are not above 0 mean none."""
    given = raw.raw.get("swiglu_limit")
    none = isinstance(given, int | float) and not isinstance(given, bool) and given <= 0
    return 0.0 if none else raw.number("swiglu_limit", 10.0)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    for spec in _tensors(config):
        stacked = spec.stacked and dataclasses.replace(spec.stacked, gguf="")
        yield dataclasses.replace(spec, gguf=None, stacked=stacked, aliases=(*spec.aliases, *_published(spec.name)))


def _tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    streams, hidden = _streams(config), config.hidden_size
    latent, index = deepseek_v32.sizes(config)
    yield from vocabulary.tensors(config)
    for number in range(config.layers):
        layer = f"model.layers.{number}"
        yield norm(f"{layer}.input_layernorm", hidden)
        yield norm(f"{layer}.post_attention_layernorm", hidden)
        for part in ("attn_hc", "ffn_hc"):
            yield from independent_connections.tensors(streams, f"{layer}.{part}", hidden)
        attention, width = f"{layer}.self_attn", config.heads * latent.value_dim
        yield from mla.tensors(config, attention, "")
        yield from linear(f"{attention}.gate_proj", (width, hidden), by_outputs((width, config.heads)))
        if number in index.own:
            yield from indexer.tensors(index, attention, hidden, latent.query_rank)
        if config.experts is not None and number in config.experts.layers:
            yield from moe.tensors(config.experts, hidden, layer, "", DEEPSEEK)
        else:
            for spec in mlp.tensors(config, f"{layer}.mlp", ""):
                yield dataclasses.replace(spec, split=None) if config.whole_dense else spec
    yield from constrained_connections.head_tensors(streams, "model.hc_head", hidden)
    yield norm("model.norm", hidden)


def _streams(config: ModelConfig) -> StreamConfig:
    assert isinstance(config, HunyuanV4Config)
    assert config.streams is not None, "of every model"
    return config.streams


_PUBLISHED = (
    (r"\.sinks$", ".learnable_sink_param"),
    (r"\.gate_proj\.", ".linear_gate."),
    (r"\.attn_hc\.(\w+)$", r".hc_attn_layer.hc_\1"),
    (r"\.ffn_hc\.(\w+)$", r".hc_mlp_layer.hc_\1"),
    (r"\.hc_head\.hc_(\w+)$", r".hc_head.hc_head_\1"),
)
"""Patterns of transformers' names of tensors, and what stands there in the published files."""


def _published(name: str) -> Iterator[str]:
    """The names of a tensor other than ``name``: published ones may have ``hc_pre`` before a part of the streams."""
    for pattern, other in _PUBLISHED:
        found = re.sub(pattern, other, name)
        if found != name:
            yield found
            for part in re.finditer(r"\.hc_", found):
                yield f"{found[: part.start()]}.hc_pre{found[part.start() :]}"


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """As DeepSeek V3.2."""
    return deepseek_v32.caches(config)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``. Raises ConfigError."""
    assert isinstance(config, HunyuanV4Config)
    if builder.context_parallel is not None:
        raise ConfigError(
            f"{config.architecture} does not run with --enable-nsa-prefill-context-parallel: its results are gated; "
            "leave it out"
        )
    builder = dataclasses.replace(builder, fp32_head=True)
    vocab = vocabulary.vocabulary(builder, config)
    indexers: list[Indexer] = []
    layers = [_layer(config, builder, number, indexers) for number in range(config.layers)]
    last = HyperHead(builder, _streams(config), "model.hc_head", builder.norm("model.norm", config.norm_eps))
    return Decoder(builder, config, vocab, layers, last)


def _layer(config: HunyuanV4Config, builder: LayerBuilder, number: int, indexers: list[Indexer]) -> StreamBlock:
    """The layer ``number``. ``indexers``: of the layers before; this one may add its own."""
    streams, name = _streams(config), f"model.layers.{number}"
    attention, (latent, index) = f"{name}.self_attn", deepseek_v32.sizes(config)
    if number in index.own:
        indexers.append(Indexer(builder, index, attention, latent.rope_dim))
    inner = mla.LatentAttention(builder, config, attention, indexers[-1], output=lambda x: x)
    gated = ApartGates(builder, inner, config.heads, f"{attention}.gate_proj", f"{attention}.o_proj")
    feed_forward: Linear
    if config.experts is not None and number in config.experts.layers:
        gate = LimitedGate(config.limit, before=True) if config.limit else None
        feed_forward = moe.SparseFeedForward(builder, config.experts, name, DEEPSEEK, gate)
    else:
        feed_forward = gated_mlp(sparse.dense_builder(builder, config), config, f"{name}.mlp")

    def half(connection: str, norm: str) -> StreamHalf:
        around = IndependentConnection(builder, streams, f"{name}.{connection}", config.magnitude)
        return StreamHalf(around, builder.norm(f"{name}.{norm}", config.norm_eps))

    return StreamBlock(
        (half("attn_hc", "input_layernorm"), gated),
        (half("ffn_hc", "post_attention_layernorm"), feed_forward),
        streams.count,
        is_first=number == 0,
    )
