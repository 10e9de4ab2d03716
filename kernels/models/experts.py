"""A feed-forward layer of which each token takes a few of many experts, each of them a SwiGLU of its own."""

from __future__ import annotations

from torch import Tensor

from kernels.layers.experts import ExpertWeights
from kernels.models.config import ExpertsConfig
from kernels.models.source import TensorSource
from kernels.parallel.group import Group
from kernels.platforms.base import Platform

__all__ = ["SparseFeedForward", "expert_shapes"]


def expert_shapes(config: ExpertsConfig, prefix: str, hidden: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer's experts and of what chooses them. ``prefix``: the layer's name."""
    block = f"{prefix}.{config.block}"
    shapes: dict[str, tuple[int, ...]] = {f"{block}.gate.weight": (config.count, hidden)}
    for expert in range(config.count):
        shapes[f"{block}.experts.{expert}.{config.gate}.weight"] = (config.inner, hidden)
        shapes[f"{block}.experts.{expert}.{config.up}.weight"] = (config.inner, hidden)
        shapes[f"{block}.experts.{expert}.{config.down}.weight"] = (hidden, config.inner)
    return shapes


class SparseFeedForward:
    """``sum(weight[e] * down[e](silu(gate[e](x)) * up[e](x)))`` over the experts e that a token takes. Each rank has
    its part of every expert's inner dimension."""

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

    def __call__(self, x: Tensor) -> Tensor:
        out = self.experts(x)
        return out if self.group.size == 1 else self.group.all_reduce(out)
