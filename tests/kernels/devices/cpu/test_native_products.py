"""Native products of bf16 and int8 beside float64, of every number of rows that the operators treat in another way."""

from __future__ import annotations

import pytest
import torch

from kernels.devices.cpu.device import CpuDevice
from kernels.devices.cpu.matmul import HeadWeights
from kernels.weights.quantization.weights import quantize_int8
from tests.kits.native import compiled, needs_native, platform

__all__ = ["compiled", "platform"]

pytestmark = needs_native

ROWS = (1, 2, 3, 5, 8, 9, 16, 17, 24, 31, 32, 33, 64, 127, 128, 200)


@pytest.mark.parametrize(("inputs", "outputs"), [(32, 32), (64, 80), (288, 96), (1056, 1120)])
def test_products_are_those_of_float64_but_for_rounding(inputs: int, outputs: int, platform: CpuDevice) -> None:
    """And the same bits whatever rows are beside a row. The largest weights are beyond a core's caches."""
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn(max(ROWS), inputs, generator=generator).bfloat16()
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    bias = torch.randn(outputs, generator=generator).bfloat16()
    linear = platform.linear.make_dense(weight, bias)
    exact = x.double() @ weight.double().t() + bias.double()
    noise = x.double().abs() @ weight.double().abs().t() * 2**-19  # sums in float32
    whole = linear(x)
    for rows in ROWS:
        found = linear(x[:rows])
        assert bool(((found.double() - exact[:rows]).abs() <= exact[:rows].abs() * 2**-8 + noise[:rows]).all()), rows
        assert torch.equal(found.view(torch.int16), whole[:rows].view(torch.int16)), rows


@pytest.mark.parametrize(
    ("heads", "inputs", "outputs", "behind"), [(16, 128, 512, 64), (3, 32, 96, 32), (1, 512, 80, 0)]
)
def test_products_of_heads_are_those_of_float64(
    heads: int, inputs: int, outputs: int, behind: int, platform: CpuDevice
) -> None:
    """And the same bits whatever rows are beside a row; what is behind the inputs is copied."""
    native, generator = platform.native.current, torch.Generator().manual_seed(inputs)
    assert native is not None
    x = torch.randn(max(ROWS), heads, inputs + behind, generator=generator).bfloat16()
    weights = torch.randn(heads, outputs, inputs, generator=generator).bfloat16()
    packed = HeadWeights(native, weights)
    given, wide = x[..., :inputs].double(), weights.double().transpose(1, 2)
    exact = (given.transpose(0, 1) @ wide).transpose(0, 1)
    noise = (given.abs().transpose(0, 1) @ wide.abs()).transpose(0, 1) * 2**-19  # sums in float32
    whole = native.multiply_heads(x, packed, behind)
    for rows in ROWS:
        found = native.multiply_heads(x[:rows], packed, behind)
        off = (found[..., :outputs].double() - exact[:rows]).abs()
        assert bool((off <= exact[:rows].abs() * 2**-8 + noise[:rows]).all()), rows
        assert torch.equal(found.view(torch.int16), whole[:rows].view(torch.int16)), rows
        assert torch.equal(found[..., outputs:], x[:rows, :, inputs:]), rows


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 80), (320, 96), (1024, 1120)])
def test_int8_products_are_those_of_whole_numbers(inputs: int, outputs: int, platform: CpuDevice) -> None:
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn(max(ROWS), inputs, generator=generator).bfloat16()
    weight = quantize_int8(torch.randn(outputs, inputs, generator=generator))
    scale = x.float().abs().amax(1, keepdim=True) / 127
    linear = platform.linear.make_quantized(weight, None)
    exact = (x.float() / scale).round().double() * scale.double() @ weight.dequantize(torch.float64).t()
    for rows in ROWS:
        error = (linear(x[:rows]).double() - exact[:rows]).abs()
        assert bool((error <= exact[:rows].abs() * 2**-8 + 1e-5).all()), rows
