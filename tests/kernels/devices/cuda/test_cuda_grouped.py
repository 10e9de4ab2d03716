"""Products with weights that become wider in registers, on a GPU or by Triton's interpreter, which has no bfloat16."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from kernels.devices.cuda.matmul import gemm_small_quantized, packing
from kernels.devices.cuda.matmul.gemm_small_quantized import Form, Tiles
from kernels.devices.cuda.matmul.grouped import GroupedLinear, WideWeight
from kernels.devices.cuda.matmul.number_conversions import BYTES, EIGHTHS
from kernels.weights.quantization.weights import GroupedWeight, quantize_fp8, quantize_int8


@pytest.fixture
def dtype(device) -> torch.dtype:
    return torch.float16 if device.type == "cpu" else torch.bfloat16


def grouped(outputs: int, inputs: int, bits: int, group: int, zeros: bool, dtype, scale=torch.float16) -> GroupedWeight:
    values = torch.randint(0, 256, (outputs, inputs * bits // 8), dtype=torch.uint8)
    scales = (torch.rand(outputs, inputs // group) * 0.01 + 0.001).to(scale)
    some = torch.randint(0, 17 if bits == 4 else 256, scales.shape, dtype=torch.uint8) if zeros else None
    return GroupedWeight(values, scales, some, group, bits, dtype=dtype)


def tokens(count: int, inputs: int, dtype) -> Tensor:
    return (torch.randn(count, inputs) / math.sqrt(inputs)).to(dtype)


def near(found: Tensor, expected: Tensor) -> None:
    limit = 2e-3 if found.dtype == torch.float16 else 1e-2
    found, expected = found.float().cpu(), expected.float()
    assert torch.isfinite(found).all()
    assert (found - expected).norm() <= limit * expected.norm()


def activated(product: Tensor) -> Tensor:
    gate, up = product.chunk(2, 1)
    return silu(gate) * up


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("bits", "group"), [(4, 32), (4, 64), (4, 128), (4, 256), (4, 768), (8, 32), (8, 64), (8, 128), (8, 768)]
)
def test_groups(bits, group, zeros, device, dtype):
    torch.manual_seed(group)
    weight = grouped(200, 768, bits, group, zeros, dtype)
    assert GroupedLinear.fits(weight)
    expected, bias = weight.dequantize(torch.float32), torch.randn(200).to(dtype)
    for gated in (False, True):
        linear = GroupedLinear(weight.to(device), bias.to(device), WideWeight(device), gated=gated)
        for count in (1, 3, 20, 70):
            x = tokens(count, 768, dtype)
            product = x.float() @ expected.T + bias.float()
            for _ in range(2):  # the counters of parts must be back at zero
                near(linear(x.to(device)), activated(product) if gated else product)


@pytest.mark.parametrize("count", [2, 70])
def test_an_order_of_inputs(count, device, dtype):
    torch.manual_seed(count)
    weight = grouped(64, 256, 4, 128, True, dtype)
    weight = GroupedWeight(weight.values, weight.scales, weight.zeros, 128, 4, torch.randperm(256), dtype=dtype)
    x = tokens(count, 256, dtype)
    found = GroupedLinear(weight.to(device), None, WideWeight(device))(x.to(device))
    near(found, x.float() @ weight.dequantize(torch.float32).T)


@pytest.mark.parametrize("scale", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1.0, 1e-2])
def test_scales_of_other_kinds(scale, size, device, dtype):
    weight = grouped(64, 256, 4, 64, False, dtype, scale)
    weight = GroupedWeight(weight.values, weight.scales * size, None, 64, 4, dtype=dtype)
    form = packing.pack(weight.to(device))
    assert form.brain == (scale == torch.bfloat16 or size < 1)
    wide = torch.empty(64, 256, dtype=dtype, device=device)
    packing.widen(form, packing.tile_words(weight), wide)
    expected = weight.dequantize(torch.float32)
    assert (wide.float().cpu() - expected).norm() <= 4e-3 * expected.norm()


def test_groups_that_do_not_fit(device, dtype):
    fits = [
        GroupedLinear.fits(grouped(64, inputs, bits, group, False, kind))
        for inputs, bits, group, kind in (
            (256, 4, 8, dtype),  # of no whole stretch
            (288, 4, 96, dtype),  # of no whole tile
            (576, 4, 192, dtype),
            (256, 4, 64, torch.float32),
        )
    ]
    assert fits == [False, False, True, False]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("count", [1, 5, 16, 40])
@pytest.mark.parametrize("kind", [BYTES, EIGHTHS])
def test_weights_with_a_scale_for_each_output(kind, count, gated, device, dtype):
    torch.manual_seed(count)
    if kind == EIGHTHS and device.type == "cpu":
        pytest.skip("e4m3 becomes bfloat16 only")
    plain = torch.randn(136, 1024)
    weight = quantize_int8(plain) if kind == BYTES else quantize_fp8(plain)
    expected = weight.dequantize(torch.float32)
    form = Form(kind, weight.values.view(torch.int16).to(device), weight.scales.to(device))
    arrived = gemm_small_quantized.counters(136, device)
    x = tokens(count, 1024, dtype)
    product = x.float() @ expected.T
    for tiles in (Tiles(64, 64, 6, 4), Tiles(128, 64, 4, 8)):
        near(
            gemm_small_quantized.multiply(x.to(device), form, None, arrived, gated, tiles),
            activated(product) if gated else product,
        )
    assert not arrived.any()
