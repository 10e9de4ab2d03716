"""Hyper-connections (Zhu et al., arXiv 2409.19606) of Qwen 4: several residual streams, which gates mix into the input
of a layer, and into which the layer's result is injected.

    n = norm(h), each stream by itself;   x = mean over streams of  sigmoid(up(silu(down(n) / count))) * n
    h = h + 2 * sigmoid(inject(n) / count) * layer(x), with a gate for each stream

``h`` [tokens, count * hidden]: the streams, one after the other. Every rank has all of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.core.operators import Norm
from kernels.models.layers.builder import LayerBuilder
from kernels.weights.tensors import Role, TensorSpec, linear, norm

__all__ = ["StreamMixer", "inject", "stream_norm", "tensors"]


def tensors(module: str, hidden: int, count: int, rank: int, injects: bool = True) -> Iterator[TensorSpec]:
    """The norm, both projections of the gates, and that of the injection if there is one."""
    width = count * hidden
    yield norm(f"{module}.hc_norm", width)
    yield from linear(f"{module}.input_mix_weight_down", (rank, width))
    yield from linear(f"{module}.input_mix_weight_up", (width, rank))
    if injects:
        yield from linear(f"{module}.block_inject_weight", (count, width), role=Role.ROUTER)


def stream_norm(builder: LayerBuilder, module: str, count: int, eps: float) -> Norm:
    """A norm of [tokens, count, hidden] over each stream, whose weight [count * hidden] lacks 1."""
    weight, elementwise = builder.source.take([f"{module}.weight"]), builder.ops.elementwise
    wide = (weight.float() + 1).view(count, -1)
    return elementwise.make_norm(wide if elementwise.float_weights else wide.to(weight.dtype), eps)


class StreamMixer:
    """Mixes ``count`` streams into one, by the tensors of ``module``. As a ``Norm``, where there is no injection."""

    def __init__(self, builder: LayerBuilder, module: str, count: int, eps: float, injects: bool = True) -> None:
        self._count, self._norm = count, stream_norm(builder, f"{module}.hc_norm", count, eps)
        self._down = builder.linear(f"{module}.input_mix_weight_down")
        self._up = builder.linear(f"{module}.input_mix_weight_up")
        self._inject = builder.linear(f"{module}.block_inject_weight") if injects else None

    def mix(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """``streams`` [tokens, count * hidden] -> [tokens, hidden], and the gates [tokens, count] of ``inject``."""
        assert self._inject is not None, "made with an injection"
        normed = self._normed(streams)
        return self._mixed(normed), 2 * torch.sigmoid(self._inject(normed.flatten(1)) / self._count)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, count * hidden] -> [tokens, hidden]."""
        return self._mixed(self._normed(x))

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """As ``Norm``."""
        total = x + residual
        return self(total), total

    def _normed(self, streams: Tensor) -> Tensor:
        return self._norm(streams.unflatten(1, (self._count, -1)))

    def _mixed(self, normed: Tensor) -> Tensor:
        low = F.silu(self._down(normed.flatten(1)) / self._count)
        return (torch.sigmoid(self._up(low)).view_as(normed) * normed).mean(1)


def inject(streams: Tensor, result: Tensor, gates: Tensor) -> Tensor:
    """``streams`` [tokens, count * hidden] with a layer's ``result`` [tokens, hidden], by ``gates`` [tokens, count]."""
    return streams + (result.unsqueeze(1) * gates.unsqueeze(2)).flatten(1)
