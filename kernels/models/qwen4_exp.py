"""Qwen 4, its language model (transformers' ``qwen4_exp``): gated delta nets and attention to the blocks of tokens that
an indexer chooses, all with experts, between several residual streams; some layers add embeddings of the last tokens.

Text turns all parts of a head by the same position, whatever ``mrope_section`` says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kernels.contract.caches import CacheGroup
from kernels.contract.errors import ConfigError
from kernels.core.batch import ForwardBatch
from kernels.core.operators import Norm, PendingResidual
from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import block_attention, delta_net, gqa, hyper_connections, moe, ngram_embedding, vocabulary
from kernels.models.layers.block import AttentionLayer
from kernels.models.layers.block_attention import BlockAttention, BlockIndexConfig
from kernels.models.layers.builder import ModelBuilder
from kernels.models.layers.hyper_connections import StreamMixer, inject
from kernels.models.layers.moe import SparseFeedForward
from kernels.models.layers.ngram_embedding import NgramConfig, NgramEmbedding
from kernels.models.layers.recurrent import caches as states
from kernels.weights.tensors import TensorSpec

__all__ = ["Qwen4Config", "build", "caches", "config", "tensors"]

_LAST = "model.hyper_connection_mixer"
_MAX_ID = 1 << 24  # whole numbers up to it are exact in the states' float32


@dataclass(frozen=True)
class Qwen4Config(ModelConfig):
    """``streams``: residual streams, whose gates have ``stream_rank``. ``index``: of the layers with attention; None:
    there are none. ``ngrams``: None where no layer embeds n-grams. ``sigmoid``: the gates of delta nets, not silu."""

    streams: int = 1
    stream_rank: int = 0
    index: BlockIndexConfig | None = None
    ngrams: NgramConfig | None = None
    sigmoid: bool = False

    @property
    def indexed(self) -> bool:
        return True

    @property
    def stream_size(self) -> int:
        return self.streams * self.hidden_size


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    count, chosen = raw.expert_counts()
    shared = raw.size("shared_expert_intermediate_size", 512)
    every, layers = raw.size("full_attention_interval", 4), raw.layers
    kinds = raw.layer_types("linear_attention", "full_attention", "indexed_attention") or tuple(
        "linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)
    )
    recurrent = frozenset(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
    inner, bias = ConfigReader({"intermediate_size": shared, **raw.raw}, raw.architecture), raw.flag("attention_bias")
    width = raw.size("moe_intermediate_size", 512)
    experts = ExpertsConfig(frozenset(range(layers)), count, chosen, width, raw.flag("norm_topk_prob", True), shared)
    plain = inner.decoder(qkv_bias=bias, output_bias=bias, qk_norm=True, experts=experts, head_dim=256)
    gates = raw.raw.get("output_gate_type") or "silu"
    if gates not in ("silu", "sigmoid"):
        raise ConfigError(f"output_gate_type {gates!r} is not supported; supported are silu, sigmoid")
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    fields |= {"norm_offset": 1.0, "recurrence": delta_net.read(raw, grouped=False), "recurrent": recurrent}
    return Qwen4Config(
        **fields,
        streams=_streams(raw),
        stream_rank=raw.size("hc_lowrank", 320),
        index=_index(raw, plain) if len(recurrent) < layers else None,
        ngrams=_ngrams(raw, plain, recurrent),
        sigmoid=gates == "sigmoid",
    )


def _streams(raw: ConfigReader) -> int:
    """Streams of the residual."""
    count = raw.size("hc_count", 4)
    if count < 2:
        raise ConfigError("config.json: hc_count must be 2 or more: the layers mix several residual streams")
    return count


def _index(raw: ConfigReader, plain: ModelConfig) -> BlockIndexConfig:
    budget, size = raw.size("indexer_budget"), raw.size("indexer_compress_ratio")
    index = BlockIndexConfig(raw.size("indexer_n_heads"), raw.size("indexer_head_dim"), size, budget // size)
    if (keys := raw.size("indexer_kv_heads")) != 1:
        raise ConfigError(f"config.json: indexer_kv_heads {keys} is not supported; supported is 1")
    if budget % size:
        raise ConfigError(
            f"config.json: indexer_budget {budget} is not a multiple of indexer_compress_ratio {size}, the tokens of a "
            "block"
        )
    if plain.rotary_dim > index.dim:
        raise ConfigError(
            f"config.json: indexer_head_dim {index.dim} is less than the {plain.rotary_dim} numbers of a head that are "
            "rotated"
        )
    return index


def _ngrams(raw: ConfigReader, plain: ModelConfig, recurrent: frozenset[int]) -> NgramConfig | None:
    given = raw.raw.get("ple_layer_ids") or []
    if not isinstance(given, list) or not all(type(layer) is int and layer - 1 in recurrent for layer in given):
        raise ConfigError(
            f"config.json: ple_layer_ids must be a list of layers of linear_attention, the first being 1, and is "
            f"{given!r}"
        )
    if not given:
        return None
    end, seed = raw.raw.get("eos_token_id"), raw.raw.get("seed", 1234)
    end = end[0] if isinstance(end, list) and end else end
    if type(end) is not int or not 0 <= end < plain.vocab_size:
        raise ConfigError(f"config.json: ple_layer_ids needs an eos_token_id of the vocabulary, which is {end!r}")
    if type(seed) is not int:
        raise ConfigError(f"config.json: seed must be a whole number, and is {seed!r}")
    result = NgramConfig(
        tuple(sorted({layer - 1 for layer in given})),
        raw.size("ngram_size", 3),
        raw.size("heads_per_ngram", 8),
        raw.size("ple_embed_dim", plain.hidden_size),
        raw.size("ple_conv_kernel_size", 4),
        raw.size("ngram_vocab_size_base", 20_000_000),
        raw.size("make_ngram_vocab_size_divisible_by", 128),
        raw.size("split_ngram_parts", 512),
        seed,
        end,
        plain.vocab_size,
    )
    if result.size < 2 or result.dim % result.head_count:
        raise ConfigError(
            f"config.json: ple_embed_dim {result.dim} is not a multiple of the heads, heads_per_ngram {result.heads} "
            f"for each length of 2 to ngram_size {result.size}"
        )
    if plain.vocab_size > _MAX_ID:
        raise ConfigError(f"config.json: ple_layer_ids needs a vocab_size of at most {_MAX_ID}")
    return result


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    assert isinstance(config, Qwen4Config)
    hidden, streams, rank, experts = config.hidden_size, config.streams, config.stream_rank, config.experts
    assert experts is not None, "in every layer"
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer = f"model.layers.{index}"
        if (ngrams := config.ngrams) is not None and index in ngrams.layers:
            place = ngrams.layers.index(index)
            yield from ngram_embedding.tensors(ngrams, place, f"{layer}.ple", hidden, streams)
        for part in ("attn", "mlp"):
            yield from hyper_connections.tensors(f"{layer}.{part}_hyper_connection", hidden, streams, rank)
        if index in config.recurrent:
            yield from delta_net.tensors(config, f"{layer}.linear_attn")
        elif config.index is not None:
            yield from block_attention.tensors(config, config.index, f"{layer}.self_attn")
        for spec in moe.tensors(experts, hidden, layer, ""):
            stacked = spec.stacked and dataclasses.replace(spec.stacked, gguf="")
            yield dataclasses.replace(spec, gguf=None, stacked=stacked)
    for spec in hyper_connections.tensors(_LAST, hidden, streams, rank, injects=False):
        yield spec


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """Index keys, and keys and values of the layers with attention; states of delta nets, and of n-grams."""
    assert isinstance(config, Qwen4Config)
    groups = [*states(config)]
    if config.ngrams is not None:
        groups.append(CacheGroup(config.ngrams.state(config.streams * config.hidden_size), config.ngrams.layers))
    if config.index is not None:
        layers = tuple(layer for layer in range(config.layers) if layer not in config.recurrent)
        pages = (CacheGroup(group.spec, layers) for group in gqa.caches(config))
        groups = [CacheGroup(config.index.spec(), layers), *pages, *groups]
    return tuple(groups)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``. Raises ConfigError."""
    assert isinstance(config, Qwen4Config)
    vocab = vocabulary.vocabulary(builder, config)
    layers = [_Layer(config, builder, index) for index in range(config.layers)]
    return Decoder(builder, config, vocab, layers, StreamMixer(builder, _LAST, config.streams, config.norm_eps, False))


def _mixer(config: Qwen4Config, builder: ModelBuilder, layer: str, index: int) -> AttentionLayer:
    if index in config.recurrent:
        return delta_net.layer(builder, config, f"{layer}.linear_attn", config.sigmoid)
    assert config.index is not None, "of layers with attention"
    return BlockAttention(builder, config, config.index, f"{layer}.self_attn")


class _Layer:
    """A layer: streams between two layers' inputs and results. The first layer makes them of the embeddings."""

    def __init__(self, config: Qwen4Config, builder: ModelBuilder, index: int) -> None:
        layer, count, eps, ngrams = f"model.layers.{index}", config.streams, config.norm_eps, config.ngrams
        self._copies = count if index == 0 else 1
        self._ngrams: NgramEmbedding | None = None
        if ngrams is not None and index in ngrams.layers:
            place = ngrams.layers.index(index)
            self._ngrams = NgramEmbedding(builder, ngrams, place, f"{layer}.ple", count, eps)
        self._before_mixer = StreamMixer(builder, f"{layer}.attn_hyper_connection", count, eps)
        self._mixer = _mixer(config, builder, layer, index)
        assert config.experts is not None, "in every layer"
        self._before_experts = StreamMixer(builder, f"{layer}.mlp_hyper_connection", count, eps)
        self._experts = SparseFeedForward(builder, config.experts, layer)

    @property
    def first_norm(self) -> Norm | None:
        """None: the streams themselves are read."""
        return None

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
        """As ``DecoderLayer``; of all layers but the first, ``residual`` is [tokens, streams * hidden]."""
        streams = residual.repeat(1, self._copies) if self._copies > 1 else residual
        if self._ngrams is not None:
            cache, own = cache
            streams = self._ngrams(streams, own, batch)
        mixed, gates = self._before_mixer.mix(streams)
        result = self._mixer(mixed, cos, sin, cache, batch, wanted)
        if wanted is not None:
            streams, gates = streams.index_select(0, wanted), gates.index_select(0, wanted)
        streams = inject(streams, result, gates)
        mixed, gates = self._before_experts.mix(streams)
        return None, inject(streams, self._experts(mixed), gates)
