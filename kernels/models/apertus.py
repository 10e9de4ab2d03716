"""Apertus (Project Apertus, arXiv 2509.14233): Llama's decoder with norms of query and key heads and feed-forward
layers of xIELU, without a gate (Huang and Schlag, arXiv 2411.13010).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contract.caches import CacheGroup
from kernels.contract.errors import ConfigError
from kernels.core.operators import Linear
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, vocabulary
from kernels.models.layers.block import Block, Norms, attention
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.weights.tensors import Role, TensorSpec, by_inputs, by_outputs, linear, norm

__all__ = ["build", "caches", "config", "tensors"]


@dataclasses.dataclass(frozen=True)
class ApertusConfig(ModelConfig):
    """``xielu``: ``alpha_p`` and ``alpha_n`` of each layer, where they are not tensors; empty: they are."""

    xielu: tuple[tuple[float, float], ...] = ()


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json. Raises ConfigError where xIELU has other constants than all checkpoints."""
    if not {"rope_scaling", "rope_parameters"} & set(raw.raw):
        raw = ConfigReader({"rope_parameters": _ROPE} | dict(raw.raw), raw.architecture)
    bias = raw.flag("attention_bias")
    plain = raw.decoder(qkv_bias=bias, output_bias=bias, qk_norm=True, activation="xielu", eps=1e-5, theta=12000000.0)
    layers = raw.raw.get("xielu") or ()
    for _, _, beta, eps in layers:
        if not math.isclose(beta, _BETA, rel_tol=1e-3) or not math.isclose(eps, _EPS, rel_tol=1e-2):
            raise ConfigError(
                f"xIELU with beta {beta} and eps {eps} is not supported; supported are {_BETA} and {_EPS}"
            )
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    return ApertusConfig(**fields, xielu=tuple((positive, negative) for positive, negative, _, _ in layers))


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    assert isinstance(config, ApertusConfig)
    hidden, inner = config.hidden_size, config.intermediate_size
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer, gguf = f"model.layers.{index}", f"blk.{index}"
        yield norm(f"{layer}.attention_layernorm", hidden, f"{gguf}.attn_norm")
        yield from gqa.tensors(config, f"{layer}.self_attn", f"{gguf}.attn")
        yield norm(f"{layer}.feedforward_layernorm", hidden, f"{gguf}.ffn_norm")
        rows, columns = by_outputs((inner, inner)), by_inputs(inner, inner)
        yield from linear(f"{layer}.mlp.up_proj", (inner, hidden), rows, f"{gguf}.ffn_up")
        yield from linear(f"{layer}.mlp.down_proj", (hidden, inner), columns, f"{gguf}.ffn_down", role=Role.DOWN)
        for name, shape in ({} if config.xielu else _PARAMETERS).items():
            yield TensorSpec(f"{layer}.mlp.act_fn.{name}", shape, Role.NORM)
    yield norm("model.norm", hidden, "output_norm")


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """The caches of the layers."""
    return gqa.caches(config)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    assert isinstance(config, ApertusConfig)
    vocab = vocabulary.vocabulary(builder, config)
    layers = [_layer(config, builder, index) for index in range(config.layers)]
    return Decoder(builder, config, vocab, layers, builder.norm("model.norm", config.norm_eps))


_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""If config.json says nothing of it."""

_PARAMETERS: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
_BETA, _EPS = 0.5, -1e-6  # checkpoints hold them, too, and never others


def _layer(config: ApertusConfig, builder: LayerBuilder, index: int) -> Block:
    name, window = f"model.layers.{index}", config.windows[index]
    norms = Norms(
        before_attention=builder.norm(f"{name}.attention_layernorm", config.norm_eps),
        before_mlp=builder.norm(f"{name}.feedforward_layernorm", config.norm_eps),
    )
    feed_forward = _feed_forward(builder, f"{name}.mlp", config.xielu[index] if config.xielu else None)
    return Block(builder, config, attention(builder, config, f"{name}.self_attn", window), feed_forward, norms)


def _feed_forward(builder: LayerBuilder, name: str, alphas: tuple[float, float] | None) -> Linear:
    """``down(xielu(up(x)))``: ``p * x^2 + b * x`` above 0, else ``n * (expm1(min(x, e)) - x) + b * x``, with ``p`` and
    ``n`` of the layer. ``alphas``: as ``ApertusConfig.xielu``."""
    if alphas is None:
        positive, negative = (builder.source.take([f"{name}.act_fn.{part}"]) for part in ("alpha_p", "alpha_n"))
    else:
        positive, negative = (torch.tensor(alpha, device=builder.ops.torch_device) for alpha in alphas)
    p, n = F.softplus(positive), _BETA + F.softplus(negative)
    up, down = builder.linear(f"{name}.up_proj"), builder.row_parallel(f"{name}.down_proj")

    def xielu(x: Tensor) -> Tensor:
        x = up(x)
        return torch.where(x > 0, p * x * x, (torch.expm1(x.clamp(max=_EPS)) - x) * n) + _BETA * x

    return builder.ops.elementwise.compose(xielu, down)
