"""The CPU's native products with weights of e4m3."""

from __future__ import annotations

import pytest
import torch

from kernels.devices.cpu.quantized import CpuGroupedLinear
from kernels.weights.quantization.weights import Fp8Weight
from tests.kits.native import compiled, needs_native, platform
from tests.kits.rounded_once import assert_only_rounded_once

__all__ = ["compiled", "platform"]

pytestmark = needs_native


def weight_of(outputs, inputs, block, sizes=255):
    """All numbers there are, or so many of the largest."""
    generator = torch.Generator().manual_seed(outputs)
    codes = 127 - torch.randint(1, sizes // 2 + 1, (outputs, inputs), generator=generator, dtype=torch.uint8)
    codes |= torch.randint(0, 2, codes.shape, generator=generator, dtype=torch.uint8) << 7
    shape = (outputs,) if block is None else (-(-outputs // block[0]), -(-inputs // block[1]))
    return Fp8Weight(codes.view(torch.float8_e4m3fn), torch.rand(shape, generator=generator) * 0.01 + 0.001, block)


@pytest.mark.parametrize(
    ("outputs", "inputs", "block"),
    [(96, 192, None), (33, 64, None), (160, 320, (128, 128)), (64, 256, (64, 64)), (64, 96, (1, 32))],
)
def test_products_round_no_weight_or_are_those_of_bf16_to_the_bit(outputs, inputs, block, platform):
    for sizes in (255, 200):  # with numbers below 2^-6, and without
        weight, bias = weight_of(outputs, inputs, block, sizes), torch.randn(outputs).bfloat16()
        linear = platform.linear.make_quantized(weight, bias)
        dense = platform.linear.make_dense(weight.dequantize(torch.bfloat16), bias)
        assert isinstance(linear, CpuGroupedLinear)
        assert linear.nbytes == weight.nbytes + platform.linear.dequantized_bytes
        platform.linear.dequantized_bytes = 0
        for rows in (1, 16, 33, 140):
            x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).bfloat16()
            found = linear(x)
            if rows > 32:
                assert found.equal(dense(x))
            else:
                assert_only_rounded_once(found, x, weight.dequantize(torch.float32), bias)
            if outputs % 64 == 0:
                assert linear.gated(x).equal(platform.elementwise.silu_and_mul(found))


def test_tokens_whose_sum_is_too_large_are_none_the_less_multiplied(platform):
    weight, x = weight_of(64, 128, None), torch.randn(8, 128).bfloat16()
    weight.values.view(torch.uint8)[:, :2] = 0
    x[:, :2] = 0
    linear = platform.linear.make_quantized(weight, None)
    expected = linear(x)
    x[3, :2] = 3e38
    assert linear(x).equal(expected)


def test_a_weight_with_what_is_no_number_is_dequantized(platform):
    weight = weight_of(64, 64, None)
    weight.values.view(torch.uint8)[3, 5] = 0x7F
    linear = platform.linear.make_quantized(weight, None)
    found = linear(torch.ones(2, 64).bfloat16())
    assert found[:, 3].isnan().all()
    assert found.isnan().sum() == 2
