"""Grok 2 (xAI, https://huggingface.co/xai-org/grok-2): norms before and after both halves of a layer, and capped scores
that grow with positions. Experts have GELU's gates and a router with capped logits; they stand beside a feed-forward
layer.

    m = pre_moe_norm(h);  h = h + post_moe_norm((mlp(m) + experts(m)) / sqrt(2))

Published files are those of eight ranks, which loading joins (kernels.weights.safetensors_checkpoint).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from torch import Tensor

from kernels.contract.errors import ConfigError
from kernels.core.operators import Linear
from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, mlp, moe, vocabulary
from kernels.models.layers.block import Block, Norms, attention, gated_mlp
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.models.mixtral import NAMES
from kernels.weights.tensors import TensorSpec, norm

__all__ = ["build", "caches", "config", "tensors"]

_NORMS = ("pre_attn_norm", "post_attn_norm", "pre_moe_norm", "post_moe_norm")
"""Before and after attention, before and after experts and the feed-forward layer."""

_IN_GGUF = ("attn_norm", "attn_output_norm", "ffn_norm")
_HALF = math.sqrt(0.5)

caches = gqa.caches


@dataclasses.dataclass(frozen=True)
class GrokConfig(ModelConfig):
    """``beside``: whether a feed-forward layer stands beside the experts. ``gguf_last_norm``: the name of the last norm
    of a layer in the GGUF file."""

    beside: bool = False
    gguf_last_norm: str = ""

    @property
    def layers_alike(self) -> bool:
        """As ``ModelConfig``."""
        return True


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json. Frequencies are not scaled."""
    kind = raw.raw.get("rope_type") or "original"
    if kind != "original":
        raise ConfigError(f"rope_type {kind!r} is not supported; Grok 2 is run with original")
    count, chosen = raw.expert_counts()
    inner = raw.size("moe_intermediate_size", raw.size("intermediate_size"))
    experts = ExpertsConfig(
        frozenset(range(raw.layers)),
        count,
        chosen,
        inner,
        normalized=False,
        activation="gelu_tanh",
        router_softcap=raw.number("router_logit_softcapping", 30.0),
    )
    hidden_act = {"hidden_act": "gelu_pytorch_tanh"}  # config.json says gelu
    plain = ConfigReader({**raw.raw, **hidden_act}, raw.architecture).decoder(
        experts=experts, eps=1e-5, head_dim=128, activation="gelu_tanh"
    )
    length = raw.raw.get("attn_temperature_len", -1)
    if type(length) is not int or length in (0, 1):
        raise ConfigError(f"config.json: attn_temperature_len must be more than 1 token or -1, and is {length!r}")
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    return GrokConfig(
        **fields
        | {
            "attention_scale": raw.number("attn_output_multiplier", 0.0),
            "attention_softcap": raw.number("attn_logit_softcapping", 30.0),
            "growth_length": max(0, length),
            "logit_softcap": raw.number("final_logit_softcapping", 0.0),
            "embedding_scale": raw.number("embedding_multiplier_scale", 1.0),
            "logit_scale": raw.number("output_multiplier_scale", 1.0),
        },
        beside=raw.flag("residual_moe"),
        gguf_last_norm=str(raw.raw.get("gguf_last_norm") or ""),
    )


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    assert isinstance(config, GrokConfig)
    assert config.experts is not None
    hidden = config.hidden_size
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer, gguf = f"model.layers.{index}", f"blk.{index}"
        yield from gqa.tensors(config, f"{layer}.self_attn", f"{gguf}.attn")
        for name, foreign in zip(_NORMS, (*_IN_GGUF, config.gguf_last_norm), strict=True):
            yield norm(f"{layer}.{name}", hidden, f"{gguf}.{foreign}")
        if config.beside:
            yield from mlp.tensors(config, f"{layer}.mlp", f"{gguf}.ffn")
        yield from moe.tensors(config.experts, hidden, layer, gguf, NAMES)
    yield norm("model.norm", hidden, "output_norm")


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    assert isinstance(config, GrokConfig)
    vocab = vocabulary.vocabulary(builder, config)
    layers = [_layer(config, builder, f"model.layers.{index}") for index in range(config.layers)]
    return Decoder(builder, config, vocab, layers, builder.norm("model.norm", config.norm_eps))


def _layer(config: GrokConfig, builder: LayerBuilder, name: str) -> Block:
    norms = Norms(*(builder.norm(f"{name}.{norm}", config.norm_eps) for norm in _NORMS))
    return Block(
        builder, config, attention(builder, config, f"{name}.self_attn", 0), _experts(config, builder, name), norms
    )


def _experts(config: GrokConfig, builder: LayerBuilder, name: str) -> Linear:
    assert config.experts is not None
    experts = moe.SparseFeedForward(builder, config.experts, name, NAMES)
    if not config.beside:
        return experts
    feed_forward = gated_mlp(builder, config, f"{name}.mlp")

    def both(x: Tensor) -> Tensor:
        return (feed_forward(x) + experts(x)) * _HALF

    return builder.ops.elementwise.compose(both, lambda x: x)
