"""Kimi delta attention (Kimi Team, arXiv 2510.26692): a gated delta net in which each number of a key decays by itself.

    q, k, v = silu(convolution(project(x)));   o_proj(norm(delta_rule(q, k, v, sigmoid(b(x)), decays)) * sigmoid(g))

Families differ in how ``f`` of the decays and ``g`` are projected, and in how decays follow from ``f``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.devices.delta_rule import DeltaInputs
from kernels.models.config import ModelConfig
from kernels.models.layers.builder import LayerBuilder
from kernels.models.layers.delta_net import GatedDeltaNet, sizes
from kernels.models.layers.recurrent import CausalConvolution
from kernels.weights.tensors import GgufPlace, Role, TensorSpec, by_inputs, by_outputs, linear, norm

__all__ = ["bounded_decays", "layer", "softplus_decays", "tensors"]

Projections = Callable[[Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]
"""Tokens [n, hidden] -> queries, keys and values [n, channels]; betas' logits [n, heads]; ``f``, ``g`` [n, values]."""
Decays = Callable[[Tensor], Tensor]
"""``f`` [n, values] -> logarithms of decays, float32 [n, heads, dim]."""


def tensors(config: ModelConfig, module: str, gguf: str = "") -> Iterator[TensorSpec]:
    """Those of all families. The others are ``f``'s and ``g``'s and, in a shape of the family's, ``A_log``."""
    delta, hidden = sizes(config), config.hidden_size
    heads, width = delta.value_heads, delta.values
    by_head = by_outputs((width, heads))
    for part in "qkv":
        yield from linear(f"{module}.{part}_proj", (width, hidden), by_head, f"{gguf}.attn_{part}")
        place = GgufPlace(f"{gguf}.ssm_conv1d_{part}.weight")
        yield TensorSpec(f"{module}.{part}_conv1d.weight", (width, 1, delta.taps), Role.WIDE, by_head, place)
    yield from linear(f"{module}.b_proj", (heads, hidden), by_outputs((heads, heads)), f"{gguf}.ssm_beta")
    yield TensorSpec(f"{module}.dt_bias", (width,), Role.WIDE, by_head, GgufPlace(f"{gguf}.ssm_dt.bias"))
    yield norm(f"{module}.o_norm", delta.value_dim, f"{gguf}.ssm_norm")
    yield from linear(f"{module}.o_proj", (hidden, width), by_inputs(width, heads), f"{gguf}.attn_output")


def layer(
    builder: LayerBuilder, config: ModelConfig, module: str, project: Projections, decays: Decays
) -> GatedDeltaNet:
    """The layer of ``tensors``."""

    def inputs(x: Tensor) -> DeltaInputs:
        mixed, b, f, g = project(x)
        return DeltaInputs(mixed, g, torch.sigmoid(b.float()), decays(f))

    return GatedDeltaNet(
        builder,
        sizes(config),
        inputs,
        CausalConvolution(builder.source.take([f"{module}.{part}_conv1d.weight" for part in "qkv"])),
        builder.norm(f"{module}.o_norm", config.norm_eps),
        builder.row_parallel(f"{module}.o_proj"),
        sigmoid=True,
    )


def softplus_decays(builder: LayerBuilder, config: ModelConfig, module: str) -> Decays:
    """``-exp(A_log) * softplus(f + dt_bias)``."""
    rates, offsets = _rates(builder, config, module)
    heads, dim = sizes(config).value_heads, sizes(config).value_dim
    return lambda f: F.softplus(f.float() + offsets).view(-1, heads, dim) * -rates


def bounded_decays(builder: LayerBuilder, config: ModelConfig, module: str, bound: float) -> Decays:
    """``bound * sigmoid(exp(A_log) * (f + dt_bias))``: between ``bound``, which is less than 0, and 0."""
    rates, offsets = _rates(builder, config, module)
    heads, dim = sizes(config).value_heads, sizes(config).value_dim
    return lambda f: torch.sigmoid((f.float() + offsets).view(-1, heads, dim) * rates) * bound


def _rates(builder: LayerBuilder, config: ModelConfig, module: str) -> tuple[Tensor, Tensor]:
    """``exp(A_log)`` float32 [heads, 1], ``dt_bias`` float32 [values]."""
    rates, offsets = (builder.source.take([f"{module}.{name}"]).float() for name in ("A_log", "dt_bias"))
    return rates.exp().view(sizes(config).value_heads, 1), offsets
