"""MiniMax M3, its language model (https://huggingface.co/MiniMaxAI/MiniMax-M3): grouped-query attention, in most layers
to the blocks of tokens that an index head chooses for each group; the first feed-forward layers are dense, the others
of experts that a sigmoid scores and a correction balances, and one that all tokens take. All gates are gpt-oss's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kernels.contract.caches import CacheGroup
from kernels.contract.errors import ConfigError
from kernels.core.operators import Linear
from kernels.devices.experts import ClampedGate
from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, group_attention, mlp, moe, pre_norm, vocabulary
from kernels.models.layers.block import AttentionLayer, Block, Norms, attention
from kernels.models.layers.builder import ModelBuilder
from kernels.models.layers.group_attention import GroupAttention, GroupIndexConfig
from kernels.models.layers.sparse import dense_builder
from kernels.models.mixtral import NAMES
from kernels.weights.tensors import TensorSpec

__all__ = ["MiniMaxM3Config", "build", "caches", "config", "tensors"]

_NAMES = dataclasses.replace(
    NAMES,
    correction="e_score_correction_bias",
    shared="shared_experts",
    shared_parts=("gate_proj", "up_proj", "down_proj"),
)
_SPARSE = "minimax_m3_sparse"
_ONLY: Mapping[str, object] = {
    "use_gemma_norm": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "n_shared_experts": 1,
}
_ONLY_SPARSE: Mapping[str, object] = {"use_sparse_attention": True, "sparse_init_block": 0, "sparse_score_type": "max"}
"""Values of config.json that are the only ones supported."""


@dataclass(frozen=True)
class MiniMaxM3Config(ModelConfig):
    """``index``: of the ``sparse`` layers; None: there are none. ``gate``: of all feed-forward layers."""

    index: GroupIndexConfig | None = None
    sparse: frozenset[int] = frozenset()
    gate: ClampedGate = field(default_factory=lambda: ClampedGate(1.702, 7.0))

    @property
    def indexed(self) -> bool:
        return bool(self.sparse)


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    given = _as_transformers(raw)
    inner = ConfigReader(given, raw.architecture)
    own: dict[str, Any] = {"intermediate_size": given.get("dense_intermediate_size", 12288)}
    outer = ConfigReader(given | own, raw.architecture, {"intermediate_size": "dense_intermediate_size"})
    count, chosen = inner.expert_counts()
    experts = ExpertsConfig(
        inner.later_layers(),
        count,
        chosen,
        inner.size("intermediate_size"),
        normalized=True,
        shared=inner.size("shared_intermediate_size", 3072),
        weighted=False,
        scores="sigmoid",
        scale=inner.number("routed_scaling_factor", 2.0),
        corrected=True,
    )
    rotary = 1.0
    if given.get("rotary_dim") is not None:
        rotary = inner.size("rotary_dim") / inner.size("head_dim", 128)
    plain = outer.decoder(experts=experts, qk_norm=True, head_dim=128, rotary=rotary, theta=5000000.0)
    kinds = inner.layer_types("full_attention", _SPARSE)
    sparse = frozenset(layer for layer, kind in enumerate(kinds) if kind == _SPARSE)
    fields = {one.name: getattr(plain, one.name) for one in dataclasses.fields(plain)}
    return MiniMaxM3Config(
        **fields | {"norm_offset": 0.0 if raw.flag("whole_norms") else 1.0},
        index=_index(inner, plain) if sparse else None,
        sparse=sparse,
        gate=ClampedGate(inner.number("swiglu_alpha", 1.702), inner.number("swiglu_limit", 7.0)),
    )


def _index(raw: ConfigReader, plain: ModelConfig) -> GroupIndexConfig:
    heads = raw.size("index_n_heads", 4)
    index = GroupIndexConfig(
        raw.size("index_head_dim", 128),
        raw.size("index_block_size", 128),
        raw.size("index_topk_blocks", 16),
        raw.size("index_local_blocks", 1),
    )
    if heads != plain.kv_heads:
        raise ConfigError(
            f"config.json: index_n_heads {heads} is not supported; supported is one for each of num_key_value_heads, "
            f"{plain.kv_heads}"
        )
    if index.local > index.chosen:
        raise ConfigError(
            f"config.json: index_local_blocks {index.local} is more than index_topk_blocks {index.chosen}, the blocks "
            "that a query attends to"
        )
    if plain.rotary_dim > index.dim:
        raise ConfigError(
            f"config.json: index_head_dim {index.dim} is less than the {plain.rotary_dim} numbers of a head that are "
            "rotated"
        )
    return index


def _as_transformers(raw: ConfigReader) -> dict[str, Any]:
    """config.json by transformers' keys: published files have ``sparse_attention_config`` and ``moe_layer_freq``.
    Raises ConfigError for values that are not supported."""
    given, sparse = dict(raw.raw), raw.raw.get("sparse_attention_config") or {}
    if not isinstance(sparse, dict):
        raise ConfigError("config.json: sparse_attention_config must be an object")
    for part, known in ((given, _ONLY), (sparse, _ONLY_SPARSE)):
        for key, value in known.items():
            if part.get(key, value) != value:
                raise ConfigError(f"config.json: {key} {part[key]!r} is not supported; supported is {value!r}")
    if given.get("hidden_act") == "swigluoai":
        given["hidden_act"] = "silu"
    for key, other in (
        ("index_n_heads", "sparse_num_index_heads"),
        ("index_head_dim", "sparse_index_dim"),
        ("index_block_size", "sparse_block_size"),
        ("index_topk_blocks", "sparse_topk_blocks"),
        ("index_local_blocks", "sparse_local_block"),
    ):
        if sparse.get(other) is not None:
            given[key] = sparse[other]
    flags = sparse.get("sparse_attention_freq")
    if isinstance(flags, list) and given.get("layer_types") is None:
        given["layer_types"] = [_SPARSE if one else "full_attention" for one in flags]
        values = sparse.get("sparse_disable_index_value", flags)
        if not isinstance(values, list) or any(
            one and not two for one, two in zip(flags, [*values, *flags], strict=False)
        ):
            raise ConfigError(
                "config.json: sparse_disable_index_value must be 1 in all layers of sparse_attention_freq"
            )
    flags = given.pop("moe_layer_freq", None)
    if isinstance(flags, list) and given.get("mlp_layer_types") is None:
        given["mlp_layer_types"] = ["sparse" if one else "dense" for one in flags]
    return given


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    assert isinstance(config, MiniMaxM3Config)
    yield from vocabulary.tensors(config)
    for number in range(config.layers):
        layer, gguf = f"model.layers.{number}", f"blk.{number}"
        yield from pre_norm.norm_tensors(config, layer, gguf)
        yield from gqa.tensors(config, f"{layer}.self_attn", f"{gguf}.attn")
        if config.index is not None and number in config.sparse:
            yield from group_attention.tensors(config, config.index, f"{layer}.self_attn", f"{gguf}.indexer")
        if config.experts is not None and number in config.experts.layers:
            yield from moe.tensors(config.experts, config.hidden_size, layer, gguf, _NAMES)
        else:
            for spec in mlp.tensors(config, f"{layer}.mlp", f"{gguf}.ffn"):
                yield dataclasses.replace(spec, split=None) if config.whole_dense else spec
    yield from pre_norm.stream_norm(config, "model.norm", "output_norm")


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """Keys and values of all layers, and index keys of those with an indexer."""
    assert isinstance(config, MiniMaxM3Config)
    if config.index is None:
        return gqa.caches(config)
    return (CacheGroup(config.index.spec(), tuple(sorted(config.sparse))), *gqa.caches(config))


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    assert isinstance(config, MiniMaxM3Config)
    vocab = vocabulary.vocabulary(builder, config)
    layers = [_layer(config, builder, number) for number in range(config.layers)]
    return Decoder(builder, config, vocab, layers, builder.norm("model.norm", config.norm_eps, config.norm_offset))


def _layer(config: MiniMaxM3Config, builder: ModelBuilder, number: int) -> Block:
    name, eps, offset = f"model.layers.{number}", config.norm_eps, config.norm_offset
    norms = Norms(
        before_attention=builder.norm(f"{name}.input_layernorm", eps, offset),
        before_mlp=builder.norm(f"{name}.post_attention_layernorm", eps, offset),
    )
    mixer: AttentionLayer
    if config.index is not None and number in config.sparse:
        mixer = GroupAttention(builder, config, config.index, f"{name}.self_attn")
    else:
        mixer = attention(builder, config, f"{name}.self_attn", 0)
    return Block(builder, config, mixer, _feed_forward(config, builder, number, name), norms)


def _feed_forward(config: MiniMaxM3Config, builder: ModelBuilder, number: int, layer: str) -> Linear:
    experts, gate = config.experts, config.gate
    if experts is not None and number in experts.layers:
        return moe.SparseFeedForward(builder, experts, layer, _NAMES, gate, gate)
    whole = dense_builder(builder, config)
    inner = moe.gated_by(whole, gate, f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj")
    down = whole.row_parallel(f"{layer}.mlp.down_proj")
    return lambda x: down(inner(x))
