"""MiniMax-Text-01 and M1 (MiniMax, arXiv 2501.08313 and 2506.13585): lightning attention in most layers; Mixtral's
experts.

Layers add to what they have normed, with factors of both (DeepNorm):

    n = norm(h);  h = a * n + b * attention(n);   n = norm(h);  h = a * n + b * experts(n)
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
from kernels.devices.linear import norm_of_sum
from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import block, gqa, lightning, moe, recurrent, sparse, vocabulary
from kernels.models.layers.block import AttentionLayer
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.models.layers.lightning import LightningAttention, LightningConfig
from kernels.models.mixtral import NAMES
from kernels.weights.tensors import TensorSpec

__all__ = ["build", "caches", "config", "tensors"]

_FACTORS = (  # transformers' keys and the published ones
    ("linear_attn_alpha_factor", "layernorm_linear_attention_alpha"),
    ("linear_attn_beta_factor", "layernorm_linear_attention_beta"),
    ("full_attn_alpha_factor", "layernorm_full_attention_alpha"),
    ("full_attn_beta_factor", "layernorm_full_attention_beta"),
    ("mlp_alpha_factor", "layernorm_mlp_alpha"),
    ("mlp_beta_factor", "layernorm_mlp_beta"),
)
_FIXED: dict[str, Any] = {"postnorm": True, "shared_intermediate_size": 0}
"""Keys of config.json, and the only values for which the layers below are right."""


@dataclass(frozen=True)
class MiniMaxConfig(ModelConfig):
    """``factors``: of normed inputs and results, of lightning attention, full attention and experts."""

    factors: tuple[float, ...] = (1.0,) * 6


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    for key, only in _FIXED.items():
        if (value := raw.raw.get(key)) not in (None, only):
            raise ConfigError(f"config.json: {key} {value!r} is not supported; MiniMax-Text is run with {only!r}")
    count, chosen = raw.expert_counts()
    inner = raw.size("intermediate_size")
    experts = ExpertsConfig(frozenset(range(raw.layers)), count, chosen, inner, normalized=True)
    dim = raw.size("head_dim", raw.size("hidden_size") // raw.size("num_attention_heads"))
    rotary = raw.size("rotary_dim", dim) / dim
    layers, window = _recurrent(raw), 0 if raw.raw.get("sliding_window") is None else raw.size("sliding_window")
    windows = tuple(0 if layer in layers else window for layer in range(raw.layers))
    plain = raw.decoder(windows=windows, experts=experts, eps=1e-5, head_dim=dim, rotary=rotary, theta=1e6)
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    fields |= {"recurrence": LightningConfig(plain.heads, plain.head_dim, plain.layers), "recurrent": layers}
    return MiniMaxConfig(**fields, factors=tuple(raw.number(own, raw.number(key, 1.0)) for own, key in _FACTORS))


def _recurrent(raw: ConfigReader) -> frozenset[int]:
    """The layers with lightning attention: by ``layer_types``, or by the zeros of ``attn_type_list``; else each
    second one."""
    kinds: Any = raw.layer_types("linear_attention", "full_attention")
    listed = raw.raw.get("attn_type_list")
    if not kinds and listed is not None:
        if not isinstance(listed, list) or len(listed) != raw.layers or not set(listed) <= {0, 1}:
            raise ConfigError("config.json: attn_type_list must say 0 or 1 for each layer")
        kinds = ["full_attention" if kind else "linear_attention" for kind in listed]
    if not kinds:
        return frozenset(range(1, raw.layers, 2))
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    for spec in sparse.mixed_tensors(config, _attention_tensors, NAMES):
        stacked = spec.stacked and dataclasses.replace(spec.stacked, gguf="")
        yield dataclasses.replace(spec, gguf=None, stacked=stacked)


def _attention_tensors(config: ModelConfig, index: int) -> Iterator[TensorSpec]:
    module = f"model.layers.{index}.self_attn"
    return lightning.tensors(config, module) if index in config.recurrent else gqa.tensors(config, module, "")


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """Keys and values of the layers with full attention, states of the others."""
    return recurrent.with_attention(config, gqa.caches(config))


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    assert isinstance(config, MiniMaxConfig)
    vocab = vocabulary.vocabulary(builder, config)
    layers = [_Layer(builder, config, index) for index in range(config.layers)]
    return Decoder(builder, config, vocab, layers, builder.norm("model.norm", config.norm_eps))


class _Layer:
    """A layer of the form above."""

    def __init__(self, builder: LayerBuilder, config: MiniMaxConfig, index: int) -> None:
        name = f"model.layers.{index}"
        assert config.experts is not None
        self._first = builder.norm(f"{name}.input_layernorm", config.norm_eps)
        self._second = builder.norm(f"{name}.post_attention_layernorm", config.norm_eps)
        self._attention: AttentionLayer
        if index in config.recurrent:
            self._attention = LightningAttention(builder, config, f"{name}.self_attn", index)
        else:
            self._attention = block.attention(builder, config, f"{name}.self_attn", config.windows[index])
        begin = 0 if index in config.recurrent else 2
        self._factors = *config.factors[begin : begin + 2], *config.factors[4:]
        self._experts = moe.SparseFeedForward(builder, config.experts, name, NAMES)
        self._without_program = builder.ops.elementwise.without_program()

    @property
    def first_norm(self) -> Norm | None:
        """The norm that reads the residual stream first."""
        return self._first

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
        of_input, of_attention, of_normed, of_experts = self._factors
        normed = self._without_program(norm_of_sum(self._first, x, residual)[0])
        result = self._attention(normed, cos, sin, cache, batch, wanted)
        if wanted is not None:
            normed = normed.index_select(0, wanted)
        normed = self._second(of_input * normed + of_attention * result)
        return of_experts * self._experts(normed), of_normed * normed
