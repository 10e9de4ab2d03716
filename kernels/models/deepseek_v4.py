"""DeepSeek V4 (DeepSeek-AI, 2026): compressed attention, several residual streams, and experts in every layer; in the
first layers a table lists the experts of each token.

Checkpoints name tensors as the authors do, or as transformers. They hold further layers for the tokens after the next.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kernels.contract.caches import CacheGroup, CacheSpec, Window
from kernels.contract.errors import ConfigError
from kernels.distributed.turns import PassValue
from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import compressed_attention, constrained_connections, moe, vocabulary
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.models.layers.compressed_attention import CompressedAttention, CompressedConfig, CompressedSizes, PassRows
from kernels.models.layers.constrained_connections import HyperConnection, HyperHead, StreamConfig
from kernels.models.layers.moe import DEEPSEEK, ExpertTable, LimitedGate
from kernels.models.layers.rotary import RotaryEmbedding
from kernels.models.layers.stream_block import StreamBlock, StreamHalf
from kernels.weights.tensors import Role, TensorSpec, norm

__all__ = [
    "DeepseekV4Config",
    "build",
    "caches",
    "config",
    "head_config",
    "head_layer",
    "head_norm",
    "head_tensors",
    "tensors",
]

_SLIDING, _SPARSE, _HEAVY = KINDS = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
_RATES = {_SPARSE: 4, _HEAVY: 128}
_HASHED = dataclasses.replace(DEEPSEEK, correction="")


@dataclass(frozen=True)
class DeepseekV4Config(ModelConfig):
    """``attention``: what layers share; ``kinds``, ``rates``: of each layer, as config.json names them, and tokens of
    an entry. ``streams``: of the residual. ``hashed``: layers with a table of each token's experts."""

    attention: CompressedConfig | None = None
    kinds: tuple[str, ...] = ()
    rates: tuple[int, ...] = ()
    streams: StreamConfig | None = None
    hashed: frozenset[int] = frozenset()

    @property
    def indexed(self) -> bool:
        """As ``ModelConfig``."""
        return True

    @property
    def stream_size(self) -> int:
        """As ``ModelConfig``."""
        return _sizes(self)[1].count * self.hidden_size

    @property
    def page_unit(self) -> int:
        """As ``ModelConfig``."""
        return max([1, *(self.layer(index).shares for index in range(self.layers) if self.rates[index])])

    @property
    def row_window(self) -> Window | None:
        """As ``ModelConfig``."""
        return self.layer(0).window

    def layer(self, index: int) -> CompressedSizes:
        """The attention of a layer."""
        assert self.attention is not None
        return CompressedSizes(self.attention, self.rates[index], self.kinds[index] == _SPARSE)


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    inner, layers = raw.size("moe_intermediate_size"), raw.layers
    dim, rope_dim = raw.size("head_dim", 512), _rope_dim(raw)
    main, compress = _ropes(raw)
    own: dict[str, Any] = {
        "head_dim": rope_dim,
        "num_key_value_heads": 1,
        "intermediate_size": inner,
        "partial_rotary_factor": None,
        "rope_scaling": None,
        "rope_parameters": compress,
    }
    if raw.raw.get("num_key_value_heads", 1) != 1:
        raise ConfigError("config.json: num_key_value_heads must be 1: all heads read one vector of a token")
    if raw.raw.get("scoring_func", "sqrtsoftplus") not in ("sqrtsoftplus", "sigmoid"):
        raise ConfigError(f"scoring_func {raw.raw['scoring_func']!r} is not supported; sqrtsoftplus and sigmoid are")
    count, chosen = raw.expert_counts()
    experts = ExpertsConfig(
        frozenset(range(layers)),
        count,
        chosen,
        inner,
        normalized=True,
        shared=inner,
        weighted=False,
        scores=raw.raw.get("scoring_func", "sqrtsoftplus"),
        scale=raw.number("routed_scaling_factor", 1.5),
        corrected=True,
        limit=raw.number("swiglu_limit", 10.0),
    )
    plain = ConfigReader({**raw.raw, **own}, raw.architecture).decoder(experts=experts)
    rope = dataclasses.replace(plain.rope, head_dim=rope_dim)
    sliding = ConfigReader({**raw.raw, **own, "rope_parameters": main}, raw.architecture).decoder().rope
    kinds = _kinds(raw)
    rates = {kind: _rate(raw, kind) for kind in _RATES}
    attention = CompressedConfig(
        plain.heads,
        dim,
        rope_dim,
        raw.size("q_lora_rank"),
        raw.size("o_groups", 8),
        raw.size("o_lora_rank", 1024),
        raw.size("sliding_window", 128),
        raw.size("index_n_heads", 64),
        raw.size("index_head_dim", 128),
        raw.size("index_topk", 512),
        plain.norm_eps,
    )
    _check(attention, rates)
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    return DeepseekV4Config(
        **fields
        | {
            "head_dim": dim,
            "rope": rope,
            "ropes": {
                layer: dataclasses.replace(sliding, head_dim=rope_dim)
                for layer, kind in enumerate(kinds)
                if kind == _SLIDING
            },
            "sinks": True,
        },
        attention=attention,
        kinds=kinds,
        rates=tuple(rates.get(kind, 0) for kind in kinds),
        streams=StreamConfig(
            raw.size("hc_mult", 4), raw.size("hc_sinkhorn_iters", 20), raw.number("hc_eps", 1e-6), plain.norm_eps
        ),
        hashed=_hashed(raw),
    )


def _rope_dim(raw: ConfigReader) -> int:
    """Numbers of a head that are rotated."""
    dim = raw.size("head_dim", 512)
    if raw.raw.get("partial_rotary_factor") is None:
        rotated = raw.size("qk_rope_head_dim", dim // 8)
    else:
        rotated = int(dim * raw.number("partial_rotary_factor", 0.125))
    if rotated % 2 or not 0 < rotated <= dim:
        raise ConfigError(f"config.json: qk_rope_head_dim {rotated} must be an even part of head_dim {dim}")
    return rotated


def _ropes(raw: ConfigReader) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rotation of layers with a window alone, and of the others and their entries."""
    given = raw.raw.get("rope_parameters") or raw.raw.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ConfigError(f"config.json: rope_parameters must be an object, and is {given!r}")
    main, compress = given.get("main"), given.get("compress")
    if not isinstance(main, dict) or not isinstance(compress, dict):
        main = {"rope_theta": raw.number("rope_theta", 10000.0)}
        compress = {**given, "rope_theta": raw.number("compress_rope_theta", 160000.0)}
    if "yarn" in (compress.get("rope_type"), compress.get("type")):
        compress = {"attention_factor": 1.0, **compress}
    return _whole(main), _whole(compress)


def _whole(parameters: dict[str, Any]) -> dict[str, Any]:
    """Without the rotated part of a head, which ``_rope_dim`` is."""
    return {key: value for key, value in parameters.items() if key != "partial_rotary_factor"}


def _kinds(raw: ConfigReader) -> tuple[str, ...]:
    """The attention of each layer: ``layer_types``, or by ``compress_ratios``."""
    ratios, layers = raw.raw.get("compress_ratios"), raw.layers
    given = raw.layer_types(*KINDS)
    if given:
        return given
    if ratios is None:
        return tuple(_HEAVY if layer < 2 or layer % 2 == 0 else _SPARSE for layer in range(layers))
    names = {0: _SLIDING, 4: _SPARSE, 128: _HEAVY}
    known = isinstance(ratios, list) and all(type(one) is int and one in names for one in ratios)
    if not known or len(ratios) < layers:
        raise ConfigError("config.json: compress_ratios must be 0, 4 or 128 for each layer")
    return tuple(names[one] for one in ratios[:layers])


def _rate(raw: ConfigReader, kind: str) -> int:
    """Tokens of an entry."""
    given = raw.raw.get("compress_rates") or {}
    key = "compress_rate_csa" if kind == _SPARSE else "compress_rate_hca"
    if not isinstance(given, dict):
        raise ConfigError(f"config.json: compress_rates must be an object, and is {given!r}")
    rates = {**_RATES, **given} | ({kind: raw.raw[key]} if raw.raw.get(key) is not None else {})
    return ConfigReader(rates, raw.architecture).size(kind)


def _hashed(raw: ConfigReader) -> frozenset[int]:
    """The layers with a table of each token's experts: of ``mlp_layer_types``, or the first ``num_hash_layers``."""
    kinds, first = raw.layer_types("hash_moe", "moe", key="mlp_layer_types"), raw.raw.get("num_hash_layers", 3)
    if kinds:
        return frozenset(layer for layer, kind in enumerate(kinds) if kind == "hash_moe")
    if type(first) is not int or first < 0:
        raise ConfigError(f"config.json: num_hash_layers must be a whole number, and is {first!r}")
    return frozenset(range(min(first, raw.layers)))


def _check(sizes: CompressedConfig, rates: dict[str, int]) -> None:
    if sizes.heads % sizes.groups:
        raise ConfigError(
            f"config.json: num_attention_heads {sizes.heads} is not a multiple of o_groups {sizes.groups}"
        )
    if sizes.index_dim < sizes.rope_dim:
        raise ConfigError(
            f"config.json: index_head_dim {sizes.index_dim} is less than qk_rope_head_dim {sizes.rope_dim}, the part "
            "of it that is rotated"
        )
    for kind, rate in rates.items():
        layer = CompressedSizes(sizes, rate, kind == _SPARSE)
        numbers = [sizes.dim, *([sizes.index_dim] if layer.sparse else [])]
        if any(number % (2 * layer.shares) for number in numbers):
            raise ConfigError(
                f"config.json: head_dim {sizes.dim} and index_head_dim {sizes.index_dim} must be multiples of "
                f"{2 * layer.shares} where compress_rates {kind} is {rate}"
            )


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    for spec in _tensors(config):
        yield dataclasses.replace(spec, aliases=(*spec.aliases, *_other_names(spec.name)))


def _tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    assert isinstance(config, DeepseekV4Config)
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        yield from _layer_tensors(config, index, f"model.layers.{index}")
    yield from _last_tensors(config, "model")


def _layer_tensors(config: DeepseekV4Config, index: int, layer: str) -> Iterator[TensorSpec]:
    (experts, streams), hidden = _sizes(config), config.hidden_size
    yield norm(f"{layer}.input_layernorm", hidden)
    yield norm(f"{layer}.post_attention_layernorm", hidden)
    yield from constrained_connections.tensors(streams, f"{layer}.attn_hc", hidden)
    yield from constrained_connections.tensors(streams, f"{layer}.ffn_hc", hidden)
    yield from compressed_attention.tensors(config.layer(index), f"{layer}.self_attn", hidden)
    hashed = index in config.hashed
    yield from moe.tensors(experts, hidden, layer, "", _HASHED if hashed else DEEPSEEK)
    if hashed:
        shape = (config.vocab_size, experts.chosen)
        yield TensorSpec(f"{layer}.mlp.gate.tid2eid", shape, Role.INDICES, of_experts=True)


def _last_tensors(config: ModelConfig, module: str) -> Iterator[TensorSpec]:
    """Of what stands before the logits."""
    yield from constrained_connections.head_tensors(_sizes(config)[1], f"{module}.hc_head", config.hidden_size)
    yield norm(f"{module}.norm", config.hidden_size)


def _sizes(config: ModelConfig) -> tuple[ExpertsConfig, StreamConfig]:
    assert isinstance(config, DeepseekV4Config), "the family reads config.json so"
    assert config.experts is not None, "every layer has experts"
    assert config.streams is not None, "of every model"
    return config.experts, config.streams


_PUBLISHED = (
    (r"^model\.embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^model\.", ""),
    (r"hc_head\.hc_", "hc_head_"),
    (r"(attn|ffn)_hc\.", r"hc_\1_"),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.e_score_correction_bias$", ".bias"),
    (r"(experts\.\d+|shared_experts)\.gate_proj\.", r"\1.w1."),
    (r"(experts\.\d+|shared_experts)\.down_proj\.", r"\1.w2."),
    (r"(experts\.\d+|shared_experts)\.up_proj\.", r"\1.w3."),
    (r"\.compressor\.indexer\.scorer\.", ".indexer."),
    (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"compressor\.kv_norm\.", "compressor.norm."),
    (r"\.gate_proj\.", ".wgate."),
    (r"\.kv_proj\.", ".wkv."),
    (r"\.position_bias$", ".ape"),
    (r"\.sinks$", ".attn_sink"),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.([qo]_[ab])_proj\.", r".w\1."),
)
"""Patterns of transformers' names of tensors, in order, and what stands there in the published files."""


def _other_names(name: str) -> tuple[str, ...]:
    """The published name of a tensor, and what transformers makes of it when it saves a model."""
    found = name
    for pattern, other in _PUBLISHED:
        found = re.sub(pattern, other, found)
    saved = found.replace(".attn.kv_norm.", ".attn.norm.")
    return found, saved if name.startswith("lm_head") else f"model.{saved}"


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """Entries of the layers that have some and what they are made from, and a window of every layer."""
    assert isinstance(config, DeepseekV4Config)
    groups: dict[CacheSpec, list[int]] = {}
    for index in range(config.layers):
        for spec in config.layer(index).entries if config.rates[index] else ():
            groups.setdefault(spec, []).append(index)
    groups[config.layer(0).window] = list(range(config.layers))
    return tuple(CacheGroup(spec, tuple(layers)) for spec, layers in groups.items())


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    assert isinstance(config, DeepseekV4Config)
    assert config.attention is not None
    ranks = config.attention.heads // config.heads
    if config.attention.groups % ranks:
        raise ConfigError(
            f"o_groups {config.attention.groups} of {config.architecture} cannot be divided by --tensor-parallel-size "
            f"{ranks}; lower it"
        )
    vocab = vocabulary.vocabulary(builder, config)
    rows, tokens = PassRows(builder.ops.memory.put), PassValue()
    context = builder.context or config.max_positions
    rotary = RotaryEmbedding(config.rope, config.rope.head_dim, builder.dtype, builder.ops, context)
    layers = [
        _layer(
            config,
            builder,
            number,
            f"model.layers.{number}",
            rotary=rotary,
            rows=rows,
            tokens=tokens,
            is_first=number == 0 and builder.stage.is_first,
        )
        for number in range(config.layers)
    ]
    return Decoder(builder, config, vocab, layers, _last(config, builder, "model"))


def head_config(raw: Mapping[str, Any], target: ModelConfig, name: str) -> DeepseekV4Config:
    """The sizes of a head for later tokens, a model of one layer with a window alone. ``raw``: config.json, in whose
    ``compress_ratios`` heads follow the ``target``'s layers. Raises ConfigError."""
    ratios, place = raw.get("compress_ratios"), target.layers + int(name.rpartition(".")[2])
    if isinstance(ratios, list) and len(ratios) > place and ratios[place] != 0:
        raise ConfigError(
            f"config.json: compress_ratios has {ratios[place]!r} for {name}, a head for later tokens, and heads with a "
            "window alone (0) are run; use --speculative-algorithm NGRAM"
        )
    own = {"num_hidden_layers": 1, "layer_types": [_SLIDING], "mlp_layer_types": ["moe"], "compress_ratios": None}
    result = config(ConfigReader({**raw, **own}, target.architecture))
    assert isinstance(result, DeepseekV4Config)
    # A token's vector is cached as a key and a value of half its numbers.
    return dataclasses.replace(result, rope=result.ropes[0], ropes={}, head_dim=result.head_dim // 2)


def head_tensors(config: ModelConfig, name: str) -> Iterator[TensorSpec]:
    """The tensors of a head's layer, and of what stands before its logits."""
    assert isinstance(config, DeepseekV4Config)
    for spec in (*_layer_tensors(config, 0, name), *_last_tensors(config, name)):
        yield dataclasses.replace(spec, aliases=(*spec.aliases, *_other_names(spec.name)))


def head_layer(config: ModelConfig, builder: LayerBuilder, name: str) -> StreamBlock:
    """The layer of ``head_tensors``, on one rank."""
    assert isinstance(config, DeepseekV4Config)
    return _layer(config, builder, 0, name, rotary=None, rows=PassRows(builder.ops.memory.put))


def head_norm(config: ModelConfig, builder: LayerBuilder, name: str) -> HyperHead:
    """What mixes a head's streams for its logits, and norms them."""
    return _last(config, builder, name)


def _last(config: ModelConfig, builder: LayerBuilder, module: str) -> HyperHead:
    streams, norm = _sizes(config)[1], builder.norm(f"{module}.norm", config.norm_eps)
    return HyperHead(builder, streams, f"{module}.hc_head", norm)


def _layer(
    config: DeepseekV4Config,
    builder: LayerBuilder,
    number: int,
    name: str,
    *,
    rotary: RotaryEmbedding | None,
    rows: PassRows,
    tokens: PassValue | None = None,
    is_first: bool = False,
) -> StreamBlock:
    """The layer ``number``, ``name`` in the checkpoint. ``rotary``: of entries. ``tokens``: that the experts of this
    pass are chosen for. ``is_first``: it reads embeddings."""
    sizes, streams = _sizes(config)
    attention = CompressedAttention(
        builder, config.layer(number), f"{name}.self_attn", config.heads, rotary=rotary, rows=rows
    )
    gate = LimitedGate(sizes.limit, before=True)
    table: ExpertTable | None = None
    if number in config.hashed:
        assert tokens is not None, "of the model's layers"
        table = ExpertTable(builder.source.take([f"{name}.mlp.gate.tid2eid"]), tokens)
    experts = moe.SparseFeedForward(
        builder, sizes, name, DEEPSEEK if table is None else _HASHED, gate, gate, table=table
    )

    def half(connection: str, norm: str) -> StreamHalf:
        around = HyperConnection(builder, streams, f"{name}.{connection}")
        return StreamHalf(around, builder.norm(f"{name}.{norm}", config.norm_eps))

    return StreamBlock(
        (half("attn_hc", "input_layernorm"), attention),
        (half("ffn_hc", "post_attention_layernorm"), experts),
        streams.count,
        is_first=is_first,
        tokens=tokens,
    )
