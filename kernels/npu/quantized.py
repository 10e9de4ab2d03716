"""Linear layers of quantized weights, by the NPU's own operators."""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from kernels.npu.operators import FRACTAL_NZ
from kernels.npu.soc import Soc
from kernels.quantization.weights import Int8Weight, StaticActivation

__all__ = ["MOST", "NpuInt8Linear", "NpuStaticLinear"]

MOST = 65535
"""The largest dimension of npu_quant_matmul."""

_TILE = (16, 32)  # of int8


class NpuInt8Linear:
    """int8 weights by tokens that are rounded one by one: npu_dynamic_quant, then npu_quant_matmul.

    The weight is [inputs, outputs], in tiles where the device keeps them. 16-bit activations.
    """

    def __init__(self, weight: Int8Weight, bias: Tensor | None, soc: Soc) -> None:
        self.values = _tiles(weight, soc)
        self.scales = weight.scales
        self.bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        whole, scales = torch_npu.npu_dynamic_quant(x)
        return self.multiply(whole, scales, x.dtype)

    def multiply(self, whole: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """``whole`` int8 [tokens, inputs], ``scales`` f32 [tokens]: of tokens that are rounded already."""
        found: Tensor = torch_npu.npu_quant_matmul(
            whole, self.values, self.scales, pertoken_scale=scales, bias=self.bias, output_dtype=dtype
        )
        return found

    @staticmethod
    def fits(weight: Int8Weight) -> bool:
        """Whether the operators take it."""
        return (
            weight.activation == "dynamic"
            and weight.dtype in (torch.bfloat16, torch.float16)
            and max(weight.shape) <= MOST
        )


class NpuStaticLinear:
    """int8 weights by inputs that are rounded by a scale that was found before: npu_quantize, which multiplies by the
    scale's reciprocal, then npu_quant_matmul with the correction as its bias. bfloat16: float16 would take the scales
    as int64, and is dequantized.

    npu_quantize takes scales of its input's dtype, float32 here: in bfloat16 a reciprocal would be off by up to 1/512.
    """

    def __init__(self, weight: Int8Weight, bias: Tensor | None, soc: Soc) -> None:
        activation = weight.activation
        assert isinstance(activation, StaticActivation)
        self.values = _tiles(weight, soc)
        inputs = weight.shape[1]
        self.reciprocal = activation.scale.reciprocal().expand(inputs).contiguous()
        offset = activation.offset
        self.offset = torch.zeros_like(self.reciprocal) if offset is None else offset.expand(inputs).contiguous()
        half = activation.scale.to(torch.bfloat16)
        exact = torch.equal(half.float(), activation.scale.float())
        self.divisor = half.expand(inputs).contiguous() if exact else None
        """The scale as npu_add_rms_norm_quant takes it beside bfloat16, where bfloat16 has it."""
        self.half_offset = self.offset.to(torch.bfloat16)
        self.scales = weight.scales * activation.scale
        self.correction = weight.correction
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        whole = torch_npu.npu_quantize(x.float(), self.reciprocal, self.offset, torch.qint8, -1, False)
        return self.multiply(whole, None, x.dtype)

    def multiply(self, whole: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """``whole`` int8 [tokens, inputs]: of tokens that are rounded already. They have no scales of their own."""
        found: Tensor = torch_npu.npu_quant_matmul(
            whole, self.values, self.scales, bias=self.correction, output_dtype=dtype
        )
        return found if self.bias is None else found.add_(self.bias)

    @staticmethod
    def fits(weight: Int8Weight) -> bool:
        """Whether the operators take it."""
        static = isinstance(weight.activation, StaticActivation)
        return static and weight.dtype == torch.bfloat16 and max(weight.shape) <= MOST


def _tiles(weight: Int8Weight, soc: Soc) -> Tensor:
    """[inputs, outputs], in tiles where the device keeps them and they divide it."""
    values = weight.values.t().contiguous()
    tiled = soc.nz_weights and values.shape[0] % _TILE[0] == 0 and values.shape[1] % _TILE[1] == 0
    return torch_npu.npu_format_cast(values, FRACTAL_NZ) if tiled else values
