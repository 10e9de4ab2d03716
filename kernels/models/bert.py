"""BERT (Devlin et al., arXiv 1810.04805) and its successors RoBERTa (Liu et al., arXiv 1907.11692) and XLM-RoBERTa
(Conneau et al., arXiv 1911.02116): encoders whose norms stand after attention and feed-forward layers.

    h = norm(words[ids] + positions[places] + segments[segments])
    for each layer:  h = norm(h + attention(h));  h = norm(h + mlp(h))
    BERT:     classes = classifier(tanh(pooler(h[first])))
    RoBERTa:  classes = out_proj(tanh(dense(h[first])))

RoBERTa counts positions from the one behind padding's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.contract.caches import CacheGroup
from kernels.contract.errors import ConfigError
from kernels.core.operators import Linear
from kernels.models.config import ConfigReader, ModelConfig, RopeConfig
from kernels.models.encoder import Encoder, EncoderBatch, EncoderLayer, attend
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.weights.tensors import Role, TensorSpec, biased_norm, embedding, linear

__all__ = ["build", "caches", "config", "tensors"]

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    given, positions = raw.raw.get("hidden_act", "gelu"), raw.raw.get("position_embedding_type") or "absolute"
    if given not in _ACTIVATIONS:
        raise ConfigError(f"hidden_act {given!r} is not supported; {raw.architecture} is run with {list(_ACTIVATIONS)}")
    if positions != "absolute":
        raise ConfigError(f"position_embedding_type {positions!r} is not supported; absolute is")
    hidden, heads = raw.size("hidden_size"), raw.size("num_attention_heads")
    if hidden % heads:
        raise ConfigError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    bert, padding = raw.architecture.startswith("Bert"), raw.raw.get("pad_token_id", 1)
    if not bert and (type(padding) is not int or padding < 0):
        raise ConfigError(f"config.json: pad_token_id must be a token id, and is {padding!r}")
    dtype = raw.raw.get("dtype") or raw.raw.get("torch_dtype")
    return ModelConfig(
        architecture=raw.architecture,
        vocab_size=raw.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=raw.size("intermediate_size"),
        layers=raw.layers,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        norm_eps=raw.number("layer_norm_eps", 1e-12),
        max_positions=raw.size("max_position_embeddings", 512),
        rope=RopeConfig(1.0, "none"),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        qk_norm=False,
        tied_embeddings=True,
        windows=(0,) * raw.layers,
        dtype=str(dtype).removeprefix("torch.") if dtype else None,
        activation=_ACTIVATIONS[given],
        layer_norms=True,
        position_table=raw.size("max_position_embeddings", 512),
        segments=raw.size("type_vocab_size", 2),
        first_position=0 if bert else padding + 1,
    )


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint. Those of a model without a head may have the prefix of one with a head."""
    prefix = "bert" if _is_bert(config) else "roberta"
    for spec in _encoder(config):
        old = spec.name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        yield dataclasses.replace(spec, aliases=(f"{prefix}.{spec.name}", f"{prefix}.{old}", old))
    if config.pooling is None or config.pooling.task != "classify":
        return
    hidden, labels = config.hidden_size, len(config.pooling.labels)
    if _is_bert(config):
        for spec in linear("pooler.dense", (hidden, hidden), bias=True, role=Role.ROUTER):
            yield dataclasses.replace(spec, aliases=(f"bert.{spec.name}",))
        yield from linear("classifier", (labels, hidden), bias=True, role=Role.ROUTER)
    else:
        yield from linear("classifier.dense", (hidden, hidden), bias=True, role=Role.ROUTER)
        yield from linear("classifier.out_proj", (labels, hidden), bias=True, role=Role.ROUTER)


def _encoder(config: ModelConfig) -> Iterator[TensorSpec]:
    hidden, inner = config.hidden_size, config.intermediate_size
    yield embedding("embeddings.word_embeddings", config.vocab_size, hidden)
    yield embedding("embeddings.position_embeddings", config.position_table, hidden)
    yield embedding("embeddings.token_type_embeddings", config.segments, hidden)
    yield from biased_norm("embeddings.LayerNorm", hidden)
    for index in range(config.layers):
        layer = f"encoder.layer.{index}"
        for part in ("query", "key", "value"):
            yield from linear(f"{layer}.attention.self.{part}", (hidden, hidden), bias=True)
        yield from linear(f"{layer}.attention.output.dense", (hidden, hidden), bias=True)
        yield from biased_norm(f"{layer}.attention.output.LayerNorm", hidden)
        yield from linear(f"{layer}.intermediate.dense", (inner, hidden), bias=True)
        yield from linear(f"{layer}.output.dense", (hidden, inner), bias=True)
        yield from biased_norm(f"{layer}.output.LayerNorm", hidden)


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """Nothing: an input runs whole."""
    return ()


def build(config: ModelConfig, builder: ModelBuilder) -> Encoder:
    """The encoder, with its head if it has one."""
    lookups = [
        builder.ops.linear.make_lookup(builder.source.take([f"embeddings.{part}_embeddings.weight"]))
        for part in ("word", "position", "token_type")
    ]
    norm = builder.layer_norm("embeddings.LayerNorm", eps=config.norm_eps)

    def embed(batch: EncoderBatch) -> Tensor:
        words, positions, segments = lookups
        return norm(
            words(batch.ids)
            + positions(batch.positions + config.first_position)
            + segments(batch.segments.clamp(max=config.segments - 1))
        )

    layers = [_layer(config, builder, f"encoder.layer.{index}") for index in range(config.layers)]
    return Encoder(embed, layers, _head(config, builder))


def _layer(config: ModelConfig, builder: LayerBuilder, name: str) -> EncoderLayer:
    qkv = builder.linear(*(f"{name}.attention.self.{part}" for part in ("query", "key", "value")))
    output = builder.linear(f"{name}.attention.output.dense")
    up = builder.ops.elementwise.activate(builder.linear(f"{name}.intermediate.dense"), config.activation)
    down = builder.linear(f"{name}.output.dense")
    after_attention = builder.layer_norm(f"{name}.attention.output.LayerNorm", eps=config.norm_eps)
    after_mlp = builder.layer_norm(f"{name}.output.LayerNorm", eps=config.norm_eps)

    def layer(hidden: Tensor, batch: EncoderBatch) -> Tensor:
        hidden = after_attention(hidden + output(attend(qkv(hidden), config.heads, batch.lengths)))
        return after_mlp(hidden + down(up(hidden)))

    return layer


def _head(config: ModelConfig, builder: LayerBuilder) -> Linear | None:
    if config.pooling is None or config.pooling.task != "classify":
        return None
    names = ("pooler.dense", "classifier") if _is_bert(config) else ("classifier.dense", "classifier.out_proj")
    inner, outer = (builder.linear(name) for name in names)
    return lambda x: outer(torch.tanh(inner(x)))


def _is_bert(config: ModelConfig) -> bool:
    return config.architecture.startswith("Bert")
