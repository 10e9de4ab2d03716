"""Weights and products for tests of matrix kernels."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from kernels.devices.cuda.matmul import packing
from kernels.devices.cuda.matmul.gemm_small_quantized import Form
from kernels.devices.cuda.matmul.number_conversions import BYTES, EIGHTHS
from kernels.weights.quantization.weights import GroupedWeight, quantize_fp8, quantize_int8

__all__ = [
    "expected_product",
    "weights",
]


def weights(kind, outputs, inputs, device):
    """The weight and its form."""
    if kind in ("int8", "fp8"):
        weight = (quantize_int8 if kind == "int8" else quantize_fp8)(torch.randn(outputs, inputs)).to(device)
        return weight, Form(BYTES if kind == "int8" else EIGHTHS, weight.values.view(torch.int16), weight.scales)
    values = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    scale = torch.bfloat16 if kind == "brain" else torch.float16
    scales = (torch.rand(outputs, inputs // 128) + 0.1).to(scale)
    zeros = torch.randint(0, 17, scales.shape, dtype=torch.uint8) if kind == "zeros" else None
    weight = GroupedWeight(values, scales, zeros, 128, 4, dtype=torch.bfloat16).to(device)
    return weight, packing.pack(weight)


def expected_product(weight, x, bias, gated, before):
    """In float64."""
    taken = x.double()
    if before is not None:
        taken = (x + before.residual).double()
        taken = taken * torch.rsqrt(taken.square().mean() + before.eps) * before.gain.double()
    expected = (taken @ weight.dequantize(torch.float64).T + bias.double()).float()
    if gated:
        gate, up = expected.chunk(2, 1)
        expected = silu(gate) * up
    return expected
