"""CLIP's text encoder (Radford et al., arXiv 2103.00020, section 2.4): a transformer whose norms stand before attention
and feed-forward layers. A token attends to those before it, and the vector of a text is the state of the token that
ends it, projected into the space that texts share with images.

    h = words[ids] + positions[places]
    for each layer:  h = h + attention(norm(h));  h = h + mlp(norm(h))
    vector = text_projection(norm(h)[end])

The encoder of images is not loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import Tensor

from kernels.contract.caches import CacheGroup
from kernels.contract.errors import ConfigError
from kernels.contract.limits import MAX_LAYERS
from kernels.models.config import ConfigReader, ModelConfig, RopeConfig
from kernels.models.encoder import Encoder, EncoderBatch, EncoderLayer, attend
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.weights.tensors import Role, TensorSpec, biased_norm, embedding, linear

__all__ = ["build", "caches", "config", "tensors"]

_ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_POSITIONS = 77
_PREFIX = "text_model."


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json. A ``text_config`` leaves out those that are transformers' defaults."""
    activation = raw.raw.get("hidden_act") or "quick_gelu"
    if activation not in _ACTIVATIONS:
        raise ConfigError(
            f"hidden_act {activation!r} is not supported; {raw.architecture} is run with {list(_ACTIVATIONS)}"
        )
    hidden, heads = raw.size("hidden_size", 512), raw.size("num_attention_heads", 8)
    if hidden % heads:
        raise ConfigError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    layers, positions = raw.size("num_hidden_layers", 12, MAX_LAYERS), raw.size("max_position_embeddings", _POSITIONS)
    dtype = raw.raw.get("dtype") or raw.raw.get("torch_dtype")
    return ModelConfig(
        architecture=raw.architecture,
        vocab_size=raw.size("vocab_size", 49408),
        hidden_size=hidden,
        intermediate_size=raw.size("intermediate_size", 2048),
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        norm_eps=raw.number("layer_norm_eps", 1e-5),
        max_positions=positions,
        rope=RopeConfig(1.0, "none"),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        qk_norm=False,
        tied_embeddings=True,
        windows=(0,) * layers,
        dtype=str(dtype).removeprefix("torch.") if dtype else None,
        activation=_ACTIVATIONS[activation],
        layer_norms=True,
        position_table=positions,
    )


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of the text encoder. Files of the encoder alone may leave the prefix out."""
    for spec in _encoder(config):
        yield dataclasses.replace(spec, aliases=(spec.name.removeprefix(_PREFIX),))
    if config.pooling is not None and config.pooling.projected:
        yield from linear("text_projection", (config.pooling.projected, config.hidden_size), role=Role.ROUTER)


def _encoder(config: ModelConfig) -> Iterator[TensorSpec]:
    hidden, inner = config.hidden_size, config.intermediate_size
    yield embedding(f"{_PREFIX}embeddings.token_embedding", config.vocab_size, hidden)
    yield embedding(f"{_PREFIX}embeddings.position_embedding", config.position_table, hidden)
    for index in range(config.layers):
        layer = f"{_PREFIX}encoder.layers.{index}"
        yield from biased_norm(f"{layer}.layer_norm1", hidden)
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from linear(f"{layer}.self_attn.{part}", (hidden, hidden), bias=True)
        yield from biased_norm(f"{layer}.layer_norm2", hidden)
        yield from linear(f"{layer}.mlp.fc1", (inner, hidden), bias=True)
        yield from linear(f"{layer}.mlp.fc2", (hidden, inner), bias=True)
    yield from biased_norm(f"{_PREFIX}final_layer_norm", hidden)


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """Nothing: an input runs whole."""
    return ()


def build(config: ModelConfig, builder: ModelBuilder) -> Encoder:
    """The encoder, with its projection if it has one."""
    words, positions = (
        builder.ops.linear.make_lookup(builder.source.take([f"{_PREFIX}embeddings.{part}_embedding.weight"]))
        for part in ("token", "position")
    )
    *others, final = [_layer(config, builder, f"{_PREFIX}encoder.layers.{index}") for index in range(config.layers)]
    last = builder.layer_norm(f"{_PREFIX}final_layer_norm", eps=config.norm_eps)
    projected = config.pooling is not None and config.pooling.projected
    return Encoder(
        lambda batch: words(batch.ids) + positions(batch.positions),
        [*others, lambda hidden, batch: last(final(hidden, batch))],
        projection=builder.linear("text_projection") if projected else None,
    )


def _layer(config: ModelConfig, builder: LayerBuilder, name: str) -> EncoderLayer:
    qkv = builder.linear(*(f"{name}.self_attn.{part}_proj" for part in "qkv"))
    output = builder.linear(f"{name}.self_attn.out_proj")
    up = builder.ops.elementwise.activate(builder.linear(f"{name}.mlp.fc1"), config.activation)
    down = builder.linear(f"{name}.mlp.fc2")
    before_attention, before_mlp = (builder.layer_norm(f"{name}.layer_norm{n}", eps=config.norm_eps) for n in (1, 2))

    def layer(hidden: Tensor, batch: EncoderBatch) -> Tensor:
        heads = attend(qkv(before_attention(hidden)), config.heads, batch.lengths, causal=True)
        hidden = hidden + output(heads)
        return hidden + down(up(before_mlp(hidden)))

    return layer
