"""A CPU whose results for a token do not depend on what else a step runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu.caches import gather_tokens
from kernels.cpu.linear import make_linear
from kernels.cpu.narrow_cache import NarrowPages
from kernels.invariant.attention import InvariantPlan, attend
from kernels.invariant.layers import angles, rotary, silu_and_mul, weighted_sum
from kernels.invariant.norm import InvariantNorm
from kernels.invariant.products import TiledLinear
from kernels.layers.experts import ExpertWeights
from kernels.platforms.base import PlatformError
from kernels.platforms.cpu import CpuPlatform
from kernels.platforms.operators import Linear, Lookup, Norm
from kernels.platforms.projections import Projections
from kernels.platforms.rows import AttentionRows
from kernels.quantization.cache import LayerScales
from kernels.quantization.weights import QuantizedWeight
from kernels.step import RunnerConfig

__all__ = ["InvariantCpuPlatform"]


class InvariantCpuPlatform(CpuPlatform):
    """As ``CpuPlatform`` on any processor, by the operators of ``kernels.invariant`` and no native ones, which take
    other kernels for few tokens than for many. Quantized weights are dequantized, experts run one by one.
    """

    samples_apart = True

    def __init__(self, config: RunnerConfig) -> None:
        if config.tp_size > 1:
            raise PlatformError(
                "how several ranks add up their parts depends on how many tokens a step has: use "
                "--enable-deterministic-inference with --tensor-parallel-size 1, or leave it out"
            )
        super().__init__(config.threads)

    def _find_native(self) -> None:
        return None

    def make_cache(
        self,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        scales: Sequence[LayerScales] | None = None,
    ) -> list[Tensor] | list[NarrowPages]:
        self._page_size = page_size
        return super().make_cache(layers, pages, page_size, kv_heads, head_dim, dtype, scales)

    def make_linear(self, weight: Tensor, bias: Tensor | None, shared: bool = False) -> Linear:
        return TiledLinear(make_linear(weight, bias, shared), weight.shape[1], weight)

    def make_tied(self, table: Tensor | QuantizedWeight) -> tuple[Lookup, Linear]:
        return Projections.make_tied(self, table)

    def make_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        return self.make_dequantized(weight, bias, "--enable-deterministic-inference has products of floats alone")

    def linear_of_floats(self, weight: Tensor) -> Linear:
        linear = self.make_linear(weight, None)
        return lambda x: linear(x.float())

    def make_experts(
        self, router: Tensor, bias: Tensor | None, experts: Sequence[ExpertWeights], chosen: int, normalized: bool
    ) -> Linear:
        return self._in_turn(router, bias, experts, chosen, normalized, "so what a token gets depends on no other")

    def make_norm(self, weight: Tensor, eps: float) -> Norm:
        return InvariantNorm(weight, eps)

    def angles(self, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return angles(positions, frequencies, scale, dtype)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        rotary(x, cos, sin, out)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return silu_and_mul(x)

    def add_weighted(self, x: Tensor, y: Tensor, logits: Tensor) -> Tensor:
        return weighted_sum(x, y, logits)

    def plan_attention(self, rows: AttentionRows, window: int) -> InvariantPlan:
        return InvariantPlan(rows, window, self._page_size, self.put)

    def attention(self, queries: Tensor, cache: Tensor | NarrowPages, plan: InvariantPlan, scale: float) -> Tensor:
        kv_heads = (cache.values if isinstance(cache, NarrowPages) else cache).shape[3]
        return attend(queries, kv_heads, lambda places: gather_tokens(cache, places), plan, scale)
