"""The gated feed-forward layer, SwiGLU (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kernels.core.operators import Linear, Norm, PendingResidual
from kernels.devices.linear import ResidualLinear
from kernels.models.config import ModelConfig
from kernels.models.layers.builder import LayerBuilder
from kernels.weights.tensors import Role, TensorSpec, by_inputs, by_outputs, linear

__all__ = ["FeedForward", "feed_forward", "tensors"]


def tensors(config: ModelConfig, module: str, gguf: str) -> Iterator[TensorSpec]:
    """``gate_proj``, ``up_proj`` and ``down_proj``. ``gguf``: what their names begin with there."""
    hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    yield from linear(f"{module}.gate_proj", (inner, hidden), by_outputs((inner, inner)), f"{gguf}_gate", bias=bias)
    yield from linear(f"{module}.up_proj", (inner, hidden), by_outputs((inner, inner)), f"{gguf}_up", bias=bias)
    down = f"{module}.down_proj"
    yield from linear(down, (hidden, inner), by_inputs(inner, inner), f"{gguf}_down", bias=bias, role=Role.DOWN)


def feed_forward(builder: LayerBuilder, norm: Norm, module: str) -> FeedForward:
    """The layer of ``tensors``, behind ``norm``."""
    gate_up = builder.gated(f"{module}.gate_proj", f"{module}.up_proj")
    return FeedForward(builder, norm, gate_up, builder.into_stream(f"{module}.down_proj"))


class FeedForward:
    """``down(silu(gate(x)) * up(x))`` of the result of ``norm``."""

    def __init__(self, builder: LayerBuilder, norm: Norm, gate_up: Linear, down: ResidualLinear) -> None:
        self.gate_up = builder.ops.linear.make_norm_then_linear(norm, gate_up)
        self.down = down

    def add(self, x: PendingResidual, residual: Tensor) -> tuple[PendingResidual, Tensor]:
        """The layer of the sum of both, as ``ResidualLinear`` returns it."""
        return self.down(*self.gate_up.add(x, residual))
