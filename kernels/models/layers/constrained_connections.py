"""Hyper-connections between layers (Zhu et al., arXiv 2409.19606), as DeepSeek V4 constrains them: the residual is
several streams, of which each half of a layer reads one mixture and adds its result to all.

    pre, post, mix = weights(streams);   x = sum(pre[i] * streams[i])
    streams[i] = post[i] * half(x) + sum over j of  mix[j, i] * streams[j]

Rows and columns of ``mix`` add up to one (Sinkhorn and Knopp's iteration).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.core.operators import Norm
from kernels.models.layers.builder import LayerBuilder
from kernels.weights.tensors import Role, TensorSpec

__all__ = [
    "HyperConnection",
    "HyperHead",
    "StreamConfig",
    "head_tensors",
    "mixed_streams",
    "normed_streams",
    "tensors",
]


@dataclass(frozen=True)
class StreamConfig:
    """``count`` residual streams. ``iterations``: that make the mixture doubly stochastic. ``eps``: added to weights
    and to sums that divide; ``norm_eps``: of the norm of all streams."""

    count: int
    iterations: int
    eps: float
    norm_eps: float


def tensors(sizes: StreamConfig, module: str, hidden: int) -> Iterator[TensorSpec]:
    """The weights of one half of a layer."""
    count = (2 + sizes.count) * sizes.count
    yield TensorSpec(f"{module}.fn", (count, sizes.count * hidden), Role.WIDE)
    yield TensorSpec(f"{module}.base", (count,), Role.WIDE)
    yield TensorSpec(f"{module}.scale", (3,), Role.WIDE)


def head_tensors(sizes: StreamConfig, module: str, hidden: int) -> Iterator[TensorSpec]:
    """The weights of the mixture that the head reads."""
    yield TensorSpec(f"{module}.hc_fn", (sizes.count, sizes.count * hidden), Role.WIDE)
    yield TensorSpec(f"{module}.hc_base", (sizes.count,), Role.WIDE)
    yield TensorSpec(f"{module}.hc_scale", (1,), Role.WIDE)


class HyperConnection:
    """The streams around one half of a layer."""

    def __init__(self, builder: LayerBuilder, sizes: StreamConfig, module: str) -> None:
        self.sizes, take = sizes, builder.source.take
        self.weight, self.base = take([f"{module}.fn"]), take([f"{module}.base"])
        parts = torch.tensor([sizes.count, sizes.count, sizes.count**2], device=self.base.device)
        self.scale = take([f"{module}.scale"]).repeat_interleave(parts)

    def read(self, streams: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """``streams`` [tokens, count, hidden] -> what the half reads [tokens, hidden], and what ``write`` needs."""
        sizes, count = self.sizes, self.sizes.count
        logits = F.linear(normed_streams(streams, sizes.norm_eps), self.weight) * self.scale + self.base
        pre, post, mix = logits.split([count, count, count**2], 1)
        shares = mix.view(-1, count, count).softmax(-1) + sizes.eps
        shares = shares / (shares.sum(-2, keepdim=True) + sizes.eps)
        for _ in range(sizes.iterations - 1):
            shares = shares / (shares.sum(-1, keepdim=True) + sizes.eps)
            shares = shares / (shares.sum(-2, keepdim=True) + sizes.eps)
        return mixed_streams(pre.sigmoid() + sizes.eps, streams), (2 * post.sigmoid(), shares)

    def write(self, streams: Tensor, result: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        """The streams after the half's ``result`` [tokens, hidden]."""
        post, shares = weights
        dtype = streams.dtype
        mixed = torch.bmm(shares.to(dtype).transpose(1, 2), streams)
        return mixed.add_(post.to(dtype).unsqueeze(2) * result.unsqueeze(1))


class HyperHead:
    """The mixture of streams that the output reads, before its ``norm``. In place of the last norm of a model."""

    def __init__(self, builder: LayerBuilder, sizes: StreamConfig, module: str, norm: Norm) -> None:
        self.sizes, self.norm, take = sizes, norm, builder.source.take
        self.weight, self.base, self.scale = (take([f"{module}.hc_{part}"]) for part in ("fn", "base", "scale"))

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, count * hidden] -> [tokens, hidden]."""
        streams = x.unflatten(1, (self.sizes.count, -1))
        logits = F.linear(normed_streams(streams, self.sizes.norm_eps), self.weight) * self.scale + self.base
        return self.norm(mixed_streams(logits.sigmoid() + self.sizes.eps, streams))

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """As ``Norm``."""
        total = x + residual
        return self(total), total


def normed_streams(streams: Tensor, eps: float) -> Tensor:
    """All streams of each token, float32 [tokens, count * hidden], divided by their root mean square."""
    wide = streams.flatten(1).float()
    return wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + eps)


def mixed_streams(weights: Tensor, streams: Tensor) -> Tensor:
    """The sum of ``streams`` times ``weights`` float32 [tokens, count]."""
    return torch.bmm(weights.unsqueeze(1), streams.float()).squeeze(1).to(streams.dtype)
