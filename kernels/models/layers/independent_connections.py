"""Hyper-connections (Zhu et al., arXiv 2409.19606) of HunYuan V4: each residual stream keeps what it has; each half of
a layer reads one mixture of all streams, and adds its result to each.

    pre, post = weights(streams);   x = sum(pre[i] * streams[i])
    streams[i] = streams[i] + post[i] * half(x)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.models.layers.builder import LayerBuilder
from kernels.models.layers.constrained_connections import StreamConfig, mixed_streams, normed_streams
from kernels.weights.tensors import Role, TensorSpec

__all__ = ["IndependentConnection", "tensors"]


def tensors(sizes: StreamConfig, module: str, hidden: int) -> Iterator[TensorSpec]:
    """The weights of one half of a layer."""
    count = 2 * sizes.count
    yield TensorSpec(f"{module}.fn", (count, sizes.count * hidden), Role.WIDE)
    yield TensorSpec(f"{module}.base", (count,), Role.WIDE)
    yield TensorSpec(f"{module}.scale", (2,), Role.WIDE)


class IndependentConnection:
    """The streams around one half of a layer. ``magnitude``: of what it adds to a stream, at most."""

    def __init__(self, builder: LayerBuilder, sizes: StreamConfig, module: str, magnitude: float) -> None:
        self.sizes, self.magnitude, take = sizes, magnitude, builder.source.take
        self.weight, self.base = take([f"{module}.fn"]), take([f"{module}.base"])
        self.scale = take([f"{module}.scale"]).repeat_interleave(sizes.count)

    def read(self, streams: Tensor) -> tuple[Tensor, tuple[Tensor]]:
        """``streams`` [tokens, count, hidden] -> what the half reads [tokens, hidden], and ``post`` float32 [tokens,
        count] of ``write``."""
        sizes = self.sizes
        logits = F.linear(normed_streams(streams, sizes.norm_eps), self.weight) * self.scale + self.base
        pre, post = logits.sigmoid().split(sizes.count, 1)
        return mixed_streams(pre + sizes.eps, streams), (self.magnitude * post + sizes.eps,)

    def write(self, streams: Tensor, result: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        """The streams after the half's ``result`` [tokens, hidden]."""
        (post,) = weights
        return torch.baddbmm(streams.float(), post.unsqueeze(2), result.float().unsqueeze(1)).to(streams.dtype)
