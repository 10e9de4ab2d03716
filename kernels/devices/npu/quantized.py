"""Linear layers with quantized weights and activations, by the NPU's operators."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch_npu
from torch import Tensor

from kernels.devices.npu.operators import FRACTAL_NZ
from kernels.devices.npu.soc import Soc
from kernels.weights.quantization.weights import Int8Weight, StaticActivation

__all__ = ["MAX_DIM", "NpuInt8Linear", "NpuStaticLinear", "QuantizedTokens"]

MAX_DIM = 65535
"""The largest dimension of npu_quant_matmul."""

_TILE = (16, 32)  # of int8


@dataclass(frozen=True, slots=True)
class QuantizedTokens:
    """Tokens that an operator has quantized for the product behind it.

    ``values`` int8 or e4m3 [tokens, inputs]. ``scales``: of each token or its blocks, as the product takes them; None
    for the static scale of the layer. ``dtype``: of the tokens before, and of the product.
    """

    values: Tensor
    scales: Tensor | None
    dtype: torch.dtype


class NpuInt8Linear:
    """int8 weights and per-token quantized activations: npu_dynamic_quant, then npu_quant_matmul.

    The weight is [inputs, outputs], in tiles if the device keeps them. Activations are 16-bit before quantization.
    """

    def __init__(self, weight: Int8Weight, bias: Tensor | None, soc: Soc) -> None:
        self.values = _tiles(weight, soc)
        self.scales = weight.scales
        self.bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        values, scales = torch_npu.npu_dynamic_quant(x)
        return self.multiply(QuantizedTokens(values, scales, x.dtype))

    def multiply(self, tokens: QuantizedTokens) -> Tensor:
        """The product with tokens in int8 that have a float32 scale each."""
        result: Tensor = torch_npu.npu_quant_matmul(
            tokens.values,
            self.values,
            self.scales,
            pertoken_scale=tokens.scales,
            bias=self.bias,
            output_dtype=tokens.dtype,
        )
        return result

    @staticmethod
    def fits(weight: Int8Weight) -> bool:
        """Whether the operators support the weight."""
        return (
            weight.activation == "dynamic"
            and weight.dtype in (torch.bfloat16, torch.float16)
            and max(weight.shape) <= MAX_DIM
        )


class NpuStaticLinear:
    """int8 weights and activations with a static scale: npu_quantize, which multiplies by the reciprocal of the scale,
    then npu_quant_matmul with the zero-point correction as its bias.

    For bfloat16; float16 would need scales in int64 and is dequantized. npu_quantize takes scales of its input's dtype,
    float32 here: the error of a reciprocal in bfloat16 would be up to 1/512.
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
        """The scale in bfloat16, for npu_add_rms_norm_quant, if bfloat16 represents it exactly."""
        self.half_offset = self.offset.to(torch.bfloat16)
        self.scales = weight.scales * activation.scale
        self.correction = weight.correction
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        whole = torch_npu.npu_quantize(x.float(), self.reciprocal, self.offset, torch.qint8, -1, False)
        return self.multiply(QuantizedTokens(whole, None, x.dtype))

    def multiply(self, tokens: QuantizedTokens) -> Tensor:
        """The product with tokens in int8 that have no scales of their own."""
        result: Tensor = torch_npu.npu_quant_matmul(
            tokens.values, self.values, self.scales, bias=self.correction, output_dtype=tokens.dtype
        )
        return result if self.bias is None else result.add_(self.bias)

    @staticmethod
    def fits(weight: Int8Weight) -> bool:
        """Whether the operators support the weight."""
        static = isinstance(weight.activation, StaticActivation)
        return static and weight.dtype == torch.bfloat16 and max(weight.shape) <= MAX_DIM


def _tiles(weight: Int8Weight, soc: Soc) -> Tensor:
    """The weight as [inputs, outputs], in tiles if the device keeps them and they divide it."""
    values = weight.values.t().contiguous()
    tiled = soc.nz_weights and values.shape[0] % _TILE[0] == 0 and values.shape[1] % _TILE[1] == 0
    return torch_npu.npu_format_cast(values, FRACTAL_NZ) if tiled else values
