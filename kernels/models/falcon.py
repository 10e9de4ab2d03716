"""Falcon (TII, arXiv 2311.16867): layer norms, and one projection of queries, keys and values in groups of heads. In
most models attention and feed-forward layer are added together, and read one norm or one each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kernels.contract.errors import ConfigError
from kernels.core.batch import ForwardBatch
from kernels.core.operators import Norm
from kernels.models import internlm2
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, vocabulary
from kernels.models.layers.block import AttentionLayer, Block, Norms, SelfAttention, plain_mlp
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.weights.tensors import Role, TensorSpec, biased_norm, by_inputs, by_outputs, linear

__all__ = ["FalconConfig", "build", "caches", "config", "tensors"]

_EMBED = "transformer.word_embeddings"

caches = gqa.caches


@dataclass(frozen=True)
class FalconConfig(ModelConfig):
    """``two_norms``: whether attention and the feed-forward layer, added together, read a norm each."""

    two_norms: bool = False

    @property
    def layers_alike(self) -> bool:
        """As ``ModelConfig``."""
        return True


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json. Raises ConfigError for ALiBi, which Falcon scales otherwise than other families."""
    if raw.flag("alibi"):
        raise ConfigError("config.json: alibi is not supported; Falcon is run with rotary positions (alibi false)")
    if (activation := raw.raw.get("activation", "gelu")) != "gelu":
        raise ConfigError(f"config.json: activation {activation!r} is not supported; Falcon is run with gelu")
    grouped, bias, heads = raw.flag("new_decoder_architecture"), raw.flag("bias"), raw.size("num_attention_heads")
    one = not grouped and raw.flag("multi_query", True)
    own = {
        **raw.raw,
        "num_key_value_heads": 1 if one else raw.size("num_kv_heads", heads),
        "intermediate_size": raw.size("ffn_hidden_size", 4 * raw.size("hidden_size")),
        "max_position_embeddings": raw.size("max_position_embeddings", 2048),
        "mlp_bias": bias,
    }
    plain = ConfigReader(own, raw.architecture).decoder(
        qkv_bias=bias, output_bias=bias, activation="gelu", norm_eps="layer_norm_epsilon", eps=1e-5, tied=True
    )
    norms = raw.size("num_ln_in_parallel_attn", 2 if grouped else 1)
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    fields["parallel_residual"] = grouped or raw.flag("parallel_attn", True)
    return FalconConfig(**fields, two_norms=grouped and norms == 2)


def _norms(config: ModelConfig) -> tuple[str, ...]:
    assert isinstance(config, FalconConfig)
    if config.two_norms:
        return "ln_attn", "ln_mlp"
    return ("input_layernorm",) if config.parallel_residual else ("input_layernorm", "post_attention_layernorm")


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    heads, kv_heads, dim = config.heads, config.kv_heads, config.head_dim
    rows = (heads + 2 * kv_heads) * dim
    yield from vocabulary.tensors(config, _EMBED)
    for index in range(config.layers):
        layer = f"transformer.h.{index}"
        for name in _norms(config):
            yield from biased_norm(f"{layer}.{name}", hidden)
        module, outputs = f"{layer}.self_attention", by_inputs(heads * dim, heads)
        yield from linear(f"{module}.query_key_value", (rows, hidden), by_outputs((rows, kv_heads)), bias=bias)
        yield from linear(f"{module}.dense", (hidden, heads * dim), outputs, bias=bias)
        up, down = f"{layer}.mlp.dense_h_to_4h", f"{layer}.mlp.dense_4h_to_h"
        yield from linear(up, (inner, hidden), by_outputs((inner, inner)), bias=bias)
        yield from linear(down, (hidden, inner), by_inputs(inner, inner), bias=bias, role=Role.DOWN)
    yield from biased_norm("transformer.ln_f", hidden)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    assert isinstance(config, FalconConfig)
    vocab = vocabulary.vocabulary(builder, config, _EMBED)
    layers = [_layer(config, builder, f"transformer.h.{index}") for index in range(config.layers)]
    return Decoder(builder, config, vocab, layers, builder.layer_norm("transformer.ln_f", eps=config.norm_eps))


def _layer(config: FalconConfig, builder: LayerBuilder, name: str) -> Block:
    first, *others = (builder.layer_norm(f"{name}.{part}", eps=config.norm_eps) for part in _norms(config))
    module = f"{name}.self_attention"
    qkv = builder.ordered(internlm2.grouped_order(config), f"{module}.query_key_value")
    attention: AttentionLayer = SelfAttention(builder, config, qkv, builder.row_parallel(f"{module}.dense"), 0)
    feed_forward = plain_mlp(builder, config, f"{name}.mlp.dense_h_to_4h", f"{name}.mlp.dense_4h_to_h")
    if not config.two_norms:
        norms = Norms(before_attention=first, before_mlp=others[0] if others else None)
        return Block(builder, config, attention, feed_forward, norms, config.parallel_residual)
    (second,) = others
    return Block(builder, config, _Normed(first, attention), lambda x: feed_forward(second(x)), Norms(), True)


class _Normed:
    """``attention`` of what ``norm`` returns."""

    def __init__(self, norm: Norm, attention: AttentionLayer) -> None:
        self.norm, self.attention = norm, attention

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Any, batch: ForwardBatch, wanted: Tensor | None
    ) -> Tensor:
        """As ``AttentionLayer``."""
        return self.attention(self.norm(x), cos, sin, cache, batch, wanted)
