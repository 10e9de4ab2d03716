"""Mistral Large 4, its language model (Mistral AI, https://huggingface.co/mistralai): GLM-5's sparse latent attention
without compressed queries, whose queries a learned line of ln(position) scales, and experts that a softmax scores.

Every fourth layer has no positions; learned factors scale the frequencies of the others (``rotary_emb.alpha``). A
layer may read the latent vectors of an earlier one, with or without an indexer of its own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kernels.contract.caches import CacheGroup, CacheSpec
from kernels.contract.errors import ConfigError
from kernels.models import deepseek_v2
from kernels.models.config import ConfigReader, IndexConfig, LatentConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import indexer, mla, sparse
from kernels.models.layers.block import AttentionLayer
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.models.layers.indexer import Indexer
from kernels.weights.tensors import Role, TensorSpec

__all__ = ["MistralLarge4Config", "build", "caches", "config", "tensors"]

_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2048.0,
    "original_max_position_embeddings": 512,
    "attention_factor": 1.0,
}
"""If config.json says nothing of rotation."""
_ALPHA = "model.rotary_emb.alpha"


@dataclass(frozen=True)
class MistralLarge4Config(ModelConfig):
    """``unrotated``: layers without positions. ``latent`` is that of the others, which make their vectors."""

    unrotated: frozenset[int] = frozenset()

    def layer(self, index: int) -> ModelConfig:
        """The sizes of a layer: where nothing is rotated, the plain part of a head is the whole."""
        latent, _ = _sizes(self)
        if index in self.unrotated:
            latent = dataclasses.replace(latent, plain_dim=latent.plain_dim + latent.rope_dim, rope_dim=0)
        return dataclasses.replace(self, latent=dataclasses.replace(latent, reads=index in self.shared_caches))


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    given = {**raw.raw, "q_lora_rank": None}
    if not (raw.raw.get("rope_parameters") or raw.raw.get("rope_scaling")):
        given["rope_parameters"] = _ROPE
    raw = ConfigReader(given, raw.architecture)
    experts = raw.deepseek_experts(raw.later_layers(1), "softmax", pair_sum=True)
    experts = dataclasses.replace(experts, normalized=True, wide_router=True)
    plain = raw.indexed_decoder(experts=experts, eps=1e-5, index_interleaved=True, own_queries=True)
    unrotated = _unrotated(raw)
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    assert plain.latent is not None, "of every latent decoder"
    fields |= {
        "latent": dataclasses.replace(plain.latent, norm_eps=plain.norm_eps, scaled=True),
        "logit_softcap": raw.number("final_logit_softcapping", 30.0),
        "shared_caches": _shared_caches(raw, unrotated),
    }
    return MistralLarge4Config(**fields, unrotated=unrotated)


def _unrotated(raw: ConfigReader) -> frozenset[int]:
    """The layers with 0 in ``no_rope_layers``, or every ``no_rope_layer_interval``-th."""
    layers, given = raw.layers, raw.raw.get("no_rope_layers")
    if given is None:
        every = raw.size("no_rope_layer_interval", 4)
        return frozenset(layer for layer in range(layers) if (layer + 1) % every == 0)
    if not isinstance(given, list) or len(given) < layers or any(one not in (0, 1) for one in given):
        raise ConfigError("config.json: no_rope_layers must say 1 or 0 for each layer, 0 for one without positions")
    return frozenset(layer for layer in range(layers) if not given[layer])


def _shared_caches(raw: ConfigReader, unrotated: frozenset[int]) -> dict[int, int]:
    """By ``kv_source_layers``: the layer whose vectors each layer reads, maybe its own."""
    layers, given = raw.layers, raw.raw.get("kv_source_layers")
    if given is None:
        return {}
    if not isinstance(given, list) or len(given) != layers or not all(type(source) is int for source in given):
        raise ConfigError("config.json: kv_source_layers must name a layer for each layer")
    for layer, source in enumerate(given):
        if not 0 <= source <= layer or given[source] != source:
            raise ConfigError(
                f"config.json: kv_source_layers has {source} for layer {layer}, which must be the layer itself or an "
                "earlier one that reads its own vectors"
            )
        if (layer in unrotated) != (source in unrotated):
            raise ConfigError(
                f"config.json: kv_source_layers has {source} for layer {layer}, and no_rope_layers rotates one of both"
            )
    return {layer: source for layer, source in enumerate(given) if layer != source}


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    for spec in _tensors(config):
        stacked = spec.stacked and dataclasses.replace(spec.stacked, gguf="")
        aliases = (*spec.aliases, _published(spec.name))
        yield dataclasses.replace(spec, gguf=None, stacked=stacked, aliases=aliases)


def _tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    latent, _ = _sizes(config)
    yield from sparse.mixed_tensors(config, _attention_tensors, deepseek_v2.NAMES)
    yield TensorSpec(_ALPHA, (latent.rope_dim // 2,), Role.WIDE)


def _attention_tensors(config: ModelConfig, index: int) -> Iterator[TensorSpec]:
    assert isinstance(config, MistralLarge4Config)
    module, (_, chosen) = f"model.layers.{index}.self_attn", _sizes(config)
    yield from mla.tensors(config.layer(index), module, "")
    if index in chosen.own:
        yield from indexer.tensors(chosen, module, config.hidden_size, 0)


_PUBLISHED = (
    (r"^model\.embed_tokens\.", "tok_embeddings."),
    (r"^lm_head\.", "output."),
    (r"^model\.rotary_emb\.", "lerope."),
    (r"^model\.", ""),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.softmax_scaling\.scale$", ".ssmax_scaling.s"),
    (r"\.softmax_scaling\.bias$", ".ssmax_scaling.b"),
    (r"\.self_attn\.", ".attention."),
    (r"\.q_proj\.", ".wq."),
    (r"\.o_proj\.", ".wo."),
    (r"\.kv_a_proj_with_mqa\.", ".wkv_a_with_mqa."),
    (r"\.kv_b_proj\.", ".wkv_b."),
    (r"\.kv_a_layernorm\.", ".kv_a_norm."),
    (r"\.mlp\.(gate|experts|shared_experts)\.", r".\1."),
    (r"\.mlp\.", ".feed_forward."),
    (r"\.gate_proj\.", ".w1."),
    (r"\.down_proj\.", ".w2."),
    (r"\.up_proj\.", ".w3."),
)
"""Patterns of transformers' names of tensors, in order, and what stands there in the published files."""


def _published(name: str) -> str:
    """The published name of a tensor."""
    for pattern, other in _PUBLISHED:
        name = re.sub(pattern, other, name)
    return name


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """One vector of each token in the layers that make them, and a key in those with an indexer."""
    assert isinstance(config, MistralLarge4Config)
    groups: dict[CacheSpec, list[int]] = {}
    for index in range(config.layers):
        latent, chosen = _sizes(config.layer(index))
        indexed = index in chosen.own
        if not latent.reads:
            groups.setdefault(latent.spec(indexed), []).append(index)
        elif indexed:
            groups.setdefault(chosen.spec(), []).append(index)
    return tuple(CacheGroup(spec, tuple(layers)) for spec, layers in groups.items())


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    last: list[Indexer] = []

    def attention(builder: LayerBuilder, config: ModelConfig, index: int) -> AttentionLayer:
        assert isinstance(config, MistralLarge4Config)
        own, module = config.layer(index), f"model.layers.{index}.self_attn"
        latent, chosen = _sizes(own)
        if index in chosen.own:
            last.append(Indexer(builder, chosen, module, latent.rope_dim))
        return mla.attention(builder, own, module, 0, last[-1])

    result = sparse.build_mixed(config, builder, attention, deepseek_v2.NAMES)
    alpha = builder.source.take([_ALPHA]).float()
    for rotary in result.rotaries:
        rotary.scale_frequencies(alpha.exp())
    return result


def _sizes(config: ModelConfig) -> tuple[LatentConfig, IndexConfig]:
    latent = config.latent
    assert latent is not None, "the family reads config.json by indexed_decoder"
    assert latent.index is not None, "the same"
    return latent, latent.index
