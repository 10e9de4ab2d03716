"""Layers whose input is quantized by the norm of the residual stream before them."""

from __future__ import annotations

from collections.abc import Callable

import torch_npu
from torch import Tensor

from kernels.core.operators import Linear, Norm, PendingResidual
from kernels.devices.elementwise import BiasedNorm
from kernels.devices.linear import NormThenLinear
from kernels.devices.npu.microscaling import NpuMxLinear
from kernels.devices.npu.operators import NpuNorm
from kernels.devices.npu.quantized import NpuInt8Linear, NpuStaticLinear, QuantizedTokens
from kernels.devices.npu.soc import Soc

__all__ = ["NpuGated", "NpuNormThenLinear"]

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
