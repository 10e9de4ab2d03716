"""A feed-forward layer of which each token takes a few of many experts, each of them a SwiGLU of its own.

Qwen2-MoE's tokens all take one more (https://huggingface.co/Qwen/Qwen1.5-MoE-A2.7B).
"""

from __future__ import annotations

from torch import Tensor

from kernels.layers.experts import ExpertWeights
from kernels.models.config import ExpertsConfig
from kernels.models.source import TensorSource
from kernels.parallel.group import Group
from kernels.platforms.base import Platform

__all__ = ["SharedExpert", "SparseFeedForward", "expert_shapes"]

_SHARED = "shared_expert"


def expert_shapes(config: ExpertsConfig, prefix: str, hidden: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer's experts and of what chooses them. ``prefix``: the layer's name."""
    block = f"{prefix}.{config.block}"
    shapes: dict[str, tuple[int, ...]] = {f"{block}.gate.weight": (config.count, hidden)}
    for expert in range(config.count):
        shapes[f"{block}.experts.{expert}.{config.gate}.weight"] = (config.inner, hidden)
        shapes[f"{block}.experts.{expert}.{config.up}.weight"] = (config.inner, hidden)
        shapes[f"{block}.experts.{expert}.{config.down}.weight"] = (hidden, config.inner)
    if config.shared:
        name = f"{block}.{_SHARED}"
        shapes[f"{name}.{config.gate}.weight"] = (config.shared, hidden)
        shapes[f"{name}.{config.up}.weight"] = (config.shared, hidden)
        shapes[f"{name}.{config.down}.weight"] = (hidden, config.shared)
        shapes[f"{name}_gate.weight"] = (1, hidden)
    return shapes


class SharedExpert:
    """``sigmoid(weight @ x) * down(silu(gate(x)) * up(x))``. Each rank has its part of the inner dimension."""

    def __init__(
        self, config: ExpertsConfig, name: str, source: TensorSource, platform: Platform, group: Group
    ) -> None:
        gates, down = [f"{name}.{config.gate}", f"{name}.{config.up}"], [f"{name}.{config.down}"]
        self.platform = platform
        self.gate_up = platform.make_gated_projection(source.projection(gates), source.biases(gates))
        bias = source.biases(down) if group.rank == 0 else None  # the sum over the ranks holds it once
        self.down = platform.make_projection(source.projection(down), bias)
        self.weight = platform.make_linear(
            source.take([f"{name}_gate.weight"]), source.biases([f"{name}_gate"]), shared=True
        )

    def add(self, x: Tensor, others: Tensor) -> Tensor:
        """To what the ``others`` [tokens, hidden] gave of ``x`` [tokens, hidden]. May overwrite them."""
        return self.platform.add_weighted(others, self.down(self.gate_up(x)), self.weight(x))


class SparseFeedForward:
    """``sum(weight[e] * down[e](silu(gate[e](x)) * up[e](x)))`` over the experts e that a token takes, and the one that
    all take. Each rank has its part of every expert's inner dimension."""

    def __init__(
        self, config: ExpertsConfig, prefix: str, source: TensorSource, platform: Platform, group: Group
    ) -> None:
        block = f"{prefix}.{config.block}"
        self.group = group
        experts = []
        for expert in range(config.count):
            name = f"{block}.experts.{expert}"
            gates, down = [f"{name}.{config.gate}", f"{name}.{config.up}"], [f"{name}.{config.down}"]
            experts.append(
                ExpertWeights(
                    source.projection(gates),
                    source.biases(gates),
                    source.projection(down),
                    source.biases(down) if group.rank == 0 else None,  # the sum over the ranks holds it once
                )
            )
        self.experts = platform.make_experts(
            source.take([f"{block}.gate.weight"]),
            source.biases([f"{block}.gate"]),
            experts,
            config.chosen,
            config.normalized,
        )
        name = f"{block}.{_SHARED}"
        self.shared = SharedExpert(config, name, source, platform, group) if config.shared else None

    def __call__(self, x: Tensor) -> Tensor:
        out = self.experts(x)
        if self.shared is not None:
            out = self.shared.add(x, out)
        return out if self.group.size == 1 else self.group.all_reduce(out)
