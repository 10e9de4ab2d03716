"""Capabilities of a device whose results for a token do not depend on what else a step runs.

All of them compute in float32 inside. They need a device's own matrix products, its caches and its copies, and no fused
kernels: these choose their tiling, and so the order of their sums, by the step's shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contract.config import RunnerConfig
from kernels.contract.errors import UnsupportedError
from kernels.core.attention_rows import AttentionRows
from kernels.core.batch import ForwardBatch
from kernels.core.layer_context import Delta, LayerContext
from kernels.core.operators import Linear, Norm
from kernels.devices.attention import Attention
from kernels.devices.cache import KvCaches
from kernels.devices.elementwise import ACTIVATIONS, Elementwise
from kernels.devices.experts import ClampedGate, ExpertLayers, Experts, ExpertWeights, Routing
from kernels.devices.fallbacks import Fallbacks
from kernels.devices.invariant.attention import InvariantPlan, Put, attend
from kernels.devices.invariant.elementwise import by_lines
from kernels.devices.invariant.latent import attend_latent
from kernels.devices.invariant.low_rank import InvariantDelta, InvariantLookupDelta
from kernels.devices.invariant.matmul import TiledLinear
from kernels.devices.invariant.norm import InvariantNorm
from kernels.devices.latent_attention import LatentHeads
from kernels.devices.latent_cache import Vectors, page_size_of
from kernels.devices.linear import LinearLayers
from kernels.weights.quantization.weights import QuantizedWeight

__all__ = [
    "GatheredCaches",
    "InvariantAttention",
    "InvariantElementwise",
    "InvariantExpertLayers",
    "InvariantLinearLayers",
    "refuse_ranks",
]

Cache = TypeVar("Cache")
Read = TypeVar("Read", contravariant=True)


def refuse_ranks(config: RunnerConfig, ranks: str, remedy: str) -> None:
    """Raises UnsupportedError if several ranks run the model. ``ranks``, ``remedy``: words of the message."""
    if config.tp_size > 1:
        raise UnsupportedError(
            f"how several {ranks} add up their parts depends on how many tokens a step has: use "
            f"--enable-deterministic-inference {remedy}, or leave it out"
        )


class InvariantElementwise(Elementwise):
    def make_norm(self, weight: Tensor, eps: float) -> Norm:
        return InvariantNorm(weight, eps)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        gate = by_lines(lambda part: F.silu(part, inplace=True), x[:, :half])
        return (gate * x[:, half:].float()).to(x.dtype)

    def activate(self, linear: Linear, activation: str) -> Linear:
        def activated(x: Tensor) -> Tensor:
            x = linear(x)
            return _activated(x, activation).to(x.dtype)

        return self.compose(activated, lambda x: x)

    def activate_and_mul(self, linear: Linear, activation: str) -> Linear:
        def gated(x: Tensor) -> Tensor:
            gate, up = linear(x).chunk(2, -1)
            return (_activated(gate, activation) * up.float()).to(up.dtype)

        return self.compose(gated, lambda x: x)

    def add_weighted(self, x: Tensor, y: Tensor, logits: Tensor) -> Tensor:
        return (x.float() + y.float() * by_lines(torch.sigmoid_, logits)).to(x.dtype)


def _activated(x: Tensor, activation: str) -> Tensor:
    """``activation`` of each number, in float32."""
    function = ACTIVATIONS[activation]
    return by_lines(lambda part: part.copy_(function(part)), x)


class InvariantLinearLayers(LinearLayers):
    """Products of ``own``, the device's, in tiles of one size. Quantized weights are dequantized."""

    def __init__(self, elementwise: Elementwise, fallbacks: Fallbacks, own: LinearLayers) -> None:
        super().__init__(elementwise, fallbacks)
        self.own = own

    def make_dense(self, weight: Tensor, bias: Tensor | None, shared: bool = False) -> Linear:
        return TiledLinear(self.own.make_dense(weight, bias, shared), weight.shape[1], weight)

    def make_delta(self, context: LayerContext, down: Tensor, up: Tensor, sizes: Sequence[int]) -> Delta:
        return InvariantDelta(context, down, up, sizes)

    def make_lookup_delta(self, context: LayerContext, down: Tensor, up: Tensor) -> Delta:
        return InvariantLookupDelta(context, down, up)

    def make_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        return self.make_dequantized(weight, bias, "--enable-deterministic-inference has products of floats alone")

    def make_float_linear(self, weight: Tensor) -> Linear:
        linear = self.make_dense(weight, None)
        return lambda x: linear(x.float())

    def dequantize(self, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
        return self.own.dequantize(weight, dtype)


class InvariantExpertLayers(ExpertLayers):
    def make(
        self,
        router: Tensor,
        bias: Tensor | None,
        experts: Sequence[ExpertWeights],
        routing: Routing,
        gate: ClampedGate | None = None,
    ) -> Experts:
        made, reason = self.make_router(router, bias, routing), "so that a token's result depends on no other"
        return self.make_in_turn(made, experts, routing, reason, gate)


class GatheredCaches(Protocol[Read]):
    """Caches whose places can be read."""

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        ...

    def gather(self, cache: Read, places: Tensor) -> Tensor:
        """The contents of ``places`` int64 [n]: floats [n, 2, kv_heads, dim]."""
        ...

    def kv_heads(self, cache: Read) -> int:
        """Key heads of a cache."""
        ...


class InvariantAttention(Attention[Cache, InvariantPlan], Generic[Cache]):
    """``gathered``: the same as ``caches``. ``put``: copies an array to the device."""

    invariant_latent = True

    def __init__(self, caches: KvCaches[Cache], gathered: GatheredCaches[Cache], put: Put) -> None:
        super().__init__(caches)
        self._gathered = gathered
        self._put = put
        self._latent_plan: InvariantPlan | None = None

    def plan(self, rows: AttentionRows, window: int) -> InvariantPlan:
        return InvariantPlan(rows, window, self._gathered.page_size, self._put)

    def attend(self, queries: Tensor, cache: Cache, plan: InvariantPlan, scale: float) -> Tensor:
        gathered = self._gathered
        return attend(queries, gathered.kv_heads(cache), lambda places: gathered.gather(cache, places), plan, scale)

    def attend_latent(
        self, queries: Tensor, cache: Vectors, batch: ForwardBatch, heads: LatentHeads, scale: float
    ) -> Tensor:
        rows, plan = batch.rows, self._latent_plan
        assert rows is not None, "steps of latent vectors have rows on the host"
        if plan is None or plan.rows is not rows:  # one for all layers of a step
            plan = self._latent_plan = InvariantPlan(rows, 0, page_size_of(cache), self._put)
        return attend_latent(queries, cache, plan, heads, scale)

    def angles(self, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        turns = positions.to(torch.float32).view(-1, 1, 1) * frequencies
        cos, sin = (by_lines(function, turns) * scale for function in (torch.cos_, torch.sin_))
        return cos.to(dtype), sin.to(dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        wide = x.float()
        swapped = wide.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
        out.copy_(wide * cos.float() + swapped * sin.float())
