"""An NVIDIA GPU whose results for a token do not depend on what else a step runs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernels.cuda.invariant import InvariantLinear
from kernels.layers.experts import ExpertWeights
from kernels.platforms.base import Platform, PlatformError
from kernels.platforms.cuda import CudaPlatform
from kernels.platforms.heads import ProjectedHeads
from kernels.platforms.operators import Linear, Norm
from kernels.platforms.projections import BehindNorm, IntoStream, Projections
from kernels.quantization.weights import Projection, QuantizedWeight
from kernels.step import RunnerConfig

__all__ = ["InvariantCudaPlatform"]


class InvariantCudaPlatform(CudaPlatform):
    """As ``CudaPlatform``, with products and attention of ``kernels.cuda.invariant`` and no kernel that is for some
    numbers of tokens only. Quantized weights are dequantized, experts run one by one.
    """

    invariant = True

    def __init__(self, config: RunnerConfig) -> None:
        if config.tp_size > 1:
            raise PlatformError(
                "how several GPUs add up their parts depends on how many tokens a step has: use "
                "--enable-deterministic-inference with one GPU, or leave it out"
            )
        super().__init__(config)

    def make_linear(self, weight: Tensor, bias: Tensor | None, shared: bool = False) -> Linear:
        return InvariantLinear(weight, bias)

    def make_gated(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return InvariantLinear(weight, bias, gated=True)

    def make_gated_projection(self, weight: Projection, bias: Tensor | None) -> Linear:
        return Projections.make_gated_projection(self, weight, bias)

    def make_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        return self.make_dequantized(weight, bias, "--enable-deterministic-inference has products of floats alone")

    def linear_of_floats(self, weight: Tensor) -> Linear:
        linear = InvariantLinear(weight, None)
        return lambda x: linear(x.float())

    def make_experts(
        self, router: Tensor, bias: Tensor | None, experts: Sequence[ExpertWeights], chosen: int, normalized: bool
    ) -> Linear:
        return self._in_turn(router, bias, experts, chosen, normalized, "so what a token gets depends on no other")

    def make_behind_norm(self, norm: Norm, linear: Linear) -> BehindNorm:
        return BehindNorm(norm, linear)

    def make_heads(
        self, projection: BehindNorm, heads: int, kv_heads: int, dim: int, norm: Norm | None
    ) -> ProjectedHeads:
        return Platform.make_heads(self, projection, heads, kv_heads, dim, norm)

    def make_into_stream(self, linear: Linear) -> IntoStream:
        return IntoStream(linear)
