"""Layers whose input is quantized by the operator before: the norm of a residual stream, or a gated activation."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch_npu
from torch import Tensor

from kernels.core.operators import Linear, Norm, PendingResidual
from kernels.devices.elementwise import BiasedNorm
from kernels.devices.linear import GatedFeedForward, NormThenLinear, ReducedLinear, ResidualLinear
from kernels.devices.npu.microscaling import NpuMxLinear
from kernels.devices.npu.operators import NpuNorm
from kernels.devices.npu.quantized import NpuInt8Linear, NpuStaticLinear, QuantizedTokens, quantize_gated
from kernels.devices.npu.soc import Soc

__all__ = ["NpuFeedForward", "NpuGated", "NpuNormThenLinear"]

_ROW = 16
"""Divisor of row sizes for npu_add_rms_norm_quant: 32 bytes (as in the vendor's graph fusion)."""


class NpuGated:
    """``silu_and_mul`` of the outputs of ``linear``."""

    def __init__(self, linear: Linear, silu_and_mul: Callable[[Tensor], Tensor]) -> None:
        self.linear = linear
        self.silu_and_mul = silu_and_mul

    def __call__(self, x: Tensor) -> Tensor:
        return self.silu_and_mul(self.linear(x))


class NpuNormThenLinear(NormThenLinear):
    """``linear`` of the outputs of ``norm``. One kernel adds the residual, norms and quantizes:
    npu_add_rms_norm_dynamic_quant, npu_add_rms_norm_quant (only A2 and A3; for bfloat16 only with scales in bfloat16)
    or npu_add_rms_norm_dynamic_mx_quant (A5).
    """

    def __init__(self, norm: Norm, linear: Linear) -> None:
        super().__init__(norm, linear)
        self._gated = linear if isinstance(linear, NpuGated) else None
        product = linear.linear if isinstance(linear, NpuGated) else linear
        assert isinstance(product, NpuInt8Linear | NpuStaticLinear | NpuMxLinear)
        self._product = product
        self._beta = norm.bias if isinstance(norm, BiasedNorm) else None
        plain = norm.norm if isinstance(norm, BiasedNorm) else norm
        assert isinstance(plain, NpuNorm)
        self._gamma, self._eps = plain.gamma, plain.eps

    @staticmethod
    def fits(norm: Norm, linear: Linear, soc: Soc) -> bool:
        """Whether a fused kernel exists for both."""
        product = linear.linear if isinstance(linear, NpuGated) else linear
        plain = norm.norm if isinstance(norm, BiasedNorm) else norm
        if not isinstance(plain, NpuNorm) or plain.head_weight is not None:
            return False
        if isinstance(product, NpuStaticLinear) and (product.divisor is None or len(plain.gamma) % _ROW):
            return False
        return isinstance(product, NpuMxLinear if soc.microscaling else NpuInt8Linear | NpuStaticLinear)

    def add(self, x: PendingResidual, residual: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(x, Tensor):
            return super().add(x, residual)
        product, scales = self._product, None
        given = {"beta": self._beta, "epsilon": self._eps}
        if isinstance(product, NpuMxLinear):
            rounded, total, scales, _ = torch_npu.npu_add_rms_norm_dynamic_mx_quant(
                x, residual, self._gamma, dst_type=torch_npu.float8_e4m3fn, **given
            )
        elif isinstance(product, NpuStaticLinear):
            rounded, _, total = torch_npu.npu_add_rms_norm_quant(
                x, residual, self._gamma, product.divisor, product.half_offset, **given
            )
        else:
            rounded, _, total, scales, _ = torch_npu.npu_add_rms_norm_dynamic_quant(x, residual, self._gamma, **given)
        result = product.multiply(QuantizedTokens(rounded, scales, x.dtype))
        return (result if self._gated is None else self._gated.silu_and_mul(result)), total


class NpuFeedForward(GatedFeedForward):
    """A gated layer whose activation quantizes to int8 for the layer behind it, by npu_dequant_swiglu_quant.

    ``gate_up``: the product of both behind the norm, without the activation.
    """

    def __init__(self, gate_up: NormThenLinear, down: ResidualLinear) -> None:
        super().__init__(gate_up, down)
        reduced = down.linear if isinstance(down.linear, ReducedLinear) else None
        linear = down.linear if reduced is None else reduced.linear
        assert isinstance(linear, NpuInt8Linear)
        self._linear, self._reduce = linear, None if reduced is None else reduced.reduce

    @staticmethod
    def fits(gate_up: Linear, down: ResidualLinear, soc: Soc) -> bool:
        """Whether the operator is documented for the device and for the dtype, bfloat16."""
        linear = down.linear.linear if isinstance(down.linear, ReducedLinear) else down.linear
        quantizes = isinstance(linear, NpuInt8Linear) and linear.dtype == torch.bfloat16
        return soc.quantizes_activations and quantizes and isinstance(gate_up, NpuGated)

    def add(self, x: PendingResidual, residual: Tensor) -> tuple[PendingResidual, Tensor]:
        both, total = self.gate_up.add(x, residual)
        result = self._linear.multiply(quantize_gated(both))
        return (result if self._reduce is None else self._reduce(result)), total
