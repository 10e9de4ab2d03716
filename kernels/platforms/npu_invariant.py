"""An NPU whose results for a token do not depend on what else a step runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.invariant.attention import InvariantPlan, attend
from kernels.invariant.layers import angles, rotary, silu_and_mul, weighted_sum
from kernels.invariant.norm import InvariantNorm
from kernels.invariant.products import TiledLinear
from kernels.layers.experts import ExpertWeights
from kernels.npu.attention import LayerCache
from kernels.npu.operators import make_linear
from kernels.platforms.base import PlatformError
from kernels.platforms.npu import NATIVE, NpuPlatform
from kernels.platforms.operators import Linear, Norm
from kernels.platforms.prepared import Decodes, PassHead
from kernels.platforms.projections import BehindNorm, Projections
from kernels.platforms.rows import AttentionRows
from kernels.quantization.weights import Projection, QuantizedWeight
from kernels.step import RunnerConfig

__all__ = ["InvariantNpuPlatform"]


class InvariantNpuPlatform(NpuPlatform):
    """As ``NpuPlatform``, by the operators of ``kernels.invariant``: the fused operators choose their tiling by the
    step's shape, and say nothing of the order of their sums. Nothing is captured, quantized weights are dequantized,
    experts run one by one.
    """

    samples_apart = True
    signed_sines = True

    def __init__(self, config: RunnerConfig) -> None:
        if config.tp_size > 1:
            raise PlatformError(
                "how several NPUs add up their parts depends on how many tokens a step has: use "
                "--enable-deterministic-inference with one NPU, or leave it out"
            )
        super().__init__(config)
        self.cut = None

    def _backend(self, chosen: str) -> str:
        return NATIVE

    def check_cache_dtype(self, dtype: torch.dtype) -> None:
        super().check_cache_dtype(dtype)
        if dtype == torch.int8:
            raise PlatformError(
                "--enable-deterministic-inference has no operator on an NPU that rounds keys and values to int8: use "
                "--kv-cache-dtype bfloat16"
            )

    def make_linear(self, weight: Tensor, bias: Tensor | None, shared: bool = False) -> Linear:
        return TiledLinear(make_linear(weight, bias, shared, self.soc), weight.shape[1], weight)

    def make_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        return self.make_dequantized(weight, bias, "--enable-deterministic-inference has products of floats alone")

    def make_gated_projection(self, weight: Projection, bias: Tensor | None) -> Linear:
        return Projections.make_gated_projection(self, weight, bias)

    def linear_of_floats(self, weight: Tensor) -> Linear:
        linear = self.make_linear(weight, None)
        return lambda x: linear(x.float())

    def make_behind_norm(self, norm: Norm, linear: Linear) -> BehindNorm:
        return BehindNorm(norm, linear)

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
        return InvariantPlan(rows, window, self._config.page_size, self.put)

    def attention(self, queries: Tensor, cache: LayerCache, plan: InvariantPlan, scale: float) -> Tensor:
        def read(places: Tensor) -> Tensor:
            parts = (part.view(-1, *part.shape[2:]).index_select(0, places) for part in (cache.keys, cache.values))
            return torch.stack(tuple(parts), 1)

        return attend(queries, cache.keys.shape[2], read, plan, scale)

    def capture_decodes(
        self,
        forward: Callable[[ForwardBatch], Tensor],
        windows: Sequence[int],
        max_rows: int,
        columns: int,
        agree: Callable[[bool], bool],
        tokens: int = 1,
        tree: bool = False,
        states: Tensor | None = None,
        prompts: int = 0,
        head: PassHead | None = None,
    ) -> Decodes | None:
        return None
