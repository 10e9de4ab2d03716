"""Falcon-H1 (TII, arXiv 2507.22448): in each layer attention and Mamba 2 read the same norm, and their results are
added. Multipliers weight what most projections read or return (section 3.2.3).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernels.contract.caches import CacheGroup
from kernels.contract.errors import ConfigError
from kernels.core.batch import ForwardBatch
from kernels.core.operators import Linear
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, mamba, mlp, recurrent, vocabulary
from kernels.models.layers.block import AttentionLayer, Block, Norms, attention
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.models.layers.mamba import Mamba, MambaConfig
from kernels.weights.tensors import GgufPlace, TensorSpec, norm

__all__ = ["FalconConfig", "build", "caches", "config", "tensors"]


@dataclasses.dataclass(frozen=True)
class FalconConfig(MambaConfig):
    """Mamba's sizes, and multipliers: of what attention and Mamba read (``reads``) and return (``returns``), in this
    order; of Mamba's gates, x, b, c and steps (``parts``); of gates of the feed-forward layer and of its results
    (``mlp``)."""

    reads: tuple[float, ...] = (1.0, 1.0)
    returns: tuple[float, ...] = (1.0, 1.0)
    parts: tuple[float, ...] = (1.0,) * 5
    mlp: tuple[float, ...] = (1.0, 1.0)


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    bias = raw.flag("attention_bias")
    plain = raw.decoder(qkv_bias=bias, output_bias=bias, eps=1e-5)
    inner = raw.size("mamba_expand", 2) * plain.hidden_size
    if raw.raw.get("mamba_d_ssm", 0) is not None:
        inner = raw.size("mamba_d_ssm", 1024)
    own = mamba.read(raw, inner)
    sizes = {field.name: getattr(own, field.name) for field in dataclasses.fields(own)}
    if not raw.flag("mamba_rms_norm"):
        sizes["norm_width"] = 0
    sizes["norm_first"] = raw.flag("mamba_norm_before_gate", True)
    sizes["output_bias"] = raw.flag("projectors_bias")
    recurrence = FalconConfig(
        **sizes,
        reads=(_factor(raw, "attention_in_multiplier"), _factor(raw, "ssm_in_multiplier")),
        returns=(_factor(raw, "attention_out_multiplier"), _factor(raw, "ssm_out_multiplier")),
        parts=_factors(raw, "ssm_multipliers", 5),
        mlp=_factors(raw, "mlp_multipliers", 2),
    )
    return dataclasses.replace(
        plain,
        attention_scale=_factor(raw, "key_multiplier") * plain.head_dim**-0.5,
        embedding_scale=_factor(raw, "embedding_multiplier"),
        logit_scale=_factor(raw, "lm_head_multiplier"),
        recurrence=recurrence,
        recurrent=frozenset(range(plain.layers)),
    )


def _factor(raw: ConfigReader, key: str) -> float:
    return raw.number(key, 1.0)


def _factors(raw: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    given = raw.raw.get(key)
    if given is None:
        return (1.0,) * count
    if not isinstance(given, list) or len(given) != count:
        raise ConfigError(f"config.json: {key} must be {count} numbers, and is {given!r}")
    return tuple(ConfigReader({key: one}, raw.architecture).number(key, 1.0) for one in given)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    hidden = config.hidden_size
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer, gguf = f"model.layers.{index}", f"blk.{index}"
        yield norm(f"{layer}.input_layernorm", hidden, f"{gguf}.attn_norm")
        yield from gqa.tensors(config, f"{layer}.self_attn", f"{gguf}.attn")
        yield from mamba.tensors(config, f"{layer}.mamba", gguf)
        second, place = norm(f"{layer}.pre_ff_layernorm", hidden), GgufPlace(f"{gguf}.ffn_norm")
        yield dataclasses.replace(second, gguf=place)  # the only norm without an ending there
        yield from mlp.tensors(config, f"{layer}.feed_forward", f"{gguf}.ffn")
    yield norm("model.final_layernorm", hidden, "output_norm")


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """Keys and values, then states, of every layer."""
    return (*gqa.caches(config), *recurrent.caches(config))


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config)
    layers = [_layer(config, builder, f"model.layers.{index}") for index in range(config.layers)]
    return Decoder(builder, config, vocab, layers, builder.norm("model.final_layernorm", config.norm_eps))


def _layer(config: ModelConfig, builder: LayerBuilder, name: str) -> Block:
    norms = Norms(
        before_attention=builder.norm(f"{name}.input_layernorm", config.norm_eps),
        before_mlp=builder.norm(f"{name}.pre_ff_layernorm", config.norm_eps),
    )
    return Block(
        builder, config, _Both(builder, config, name), _feed_forward(config, builder, f"{name}.feed_forward"), norms
    )


def _feed_forward(config: ModelConfig, builder: LayerBuilder, module: str) -> Linear:
    """``scale * down(silu(gate_scale * gate(x)) * up(x))``."""
    assert isinstance(config.recurrence, FalconConfig)
    gate_scale, scale = config.recurrence.mlp
    both = builder.linear(f"{module}.gate_proj", f"{module}.up_proj")
    down, silu_and_mul = builder.row_parallel(f"{module}.down_proj"), builder.ops.elementwise.silu_and_mul
    scales = torch.ones(2 * config.intermediate_size, dtype=torch.float32, device=builder.ops.torch_device)
    scales[: config.intermediate_size] = gate_scale

    def run(x: Tensor) -> Tensor:
        inner = both(x)
        if gate_scale != 1.0:
            inner = inner * scales.to(inner.dtype)
        result = down(silu_and_mul(inner))
        return result * scale if scale != 1.0 else result

    return run


class _Both:
    """Attention and Mamba 2 of the same tokens, with their multipliers, added."""

    def __init__(self, builder: LayerBuilder, config: ModelConfig, layer: str) -> None:
        assert isinstance(config.recurrence, FalconConfig)
        sizes = config.recurrence
        self.attention, self.rows = attention(builder, config, f"{layer}.self_attn", 0), builder.rows
        self.mamba = Mamba(builder, config, f"{layer}.mamba", sizes.parts if set(sizes.parts) != {1.0} else ())
        self.reads, self.returns = sizes.reads, sizes.returns

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Any, batch: ForwardBatch, wanted: Tensor | None
    ) -> Tensor:
        """As ``AttentionLayer``. ``cache``: attention's and Mamba's."""
        parts: tuple[AttentionLayer, AttentionLayer] = (self.attention, self.mamba)
        results: list[Tensor] = []
        for part, own, reads, returns in zip(parts, cache, self.reads, self.returns, strict=True):
            found = part(x * reads if reads != 1.0 else x, cos, sin, own, batch, None)
            results.append(found * returns if returns != 1.0 else found)
        result = results[0] + results[1]
        if wanted is None:
            return result
        if self.rows is not None:  # once for both
            self.rows.select(wanted)
        return result.index_select(0, wanted)
