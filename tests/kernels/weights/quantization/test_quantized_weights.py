"""What quantized weights stand for, and their parts and joins."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from kernels.weights.quantization import int8
from kernels.weights.quantization.int8 import Int8Linear, exact_products
from kernels.weights.quantization.weights import (
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    PartError,
    StaticActivation,
    quantize_fp8,
    quantize_int8,
)
from kernels.weights.tensors import Part


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(7)


def grouped(outputs=6, inputs=64, group=16, bits=4, zeros=True, order=None):
    per_byte = 8 // bits
    return GroupedWeight(
        torch.randint(0, 256, (outputs, inputs // per_byte), dtype=torch.uint8),
        torch.rand(outputs, inputs // group),
        torch.randint(0, 1 << bits, (outputs, inputs // group), dtype=torch.uint8) if zeros else None,
        group,
        bits,
        order,
    )


def blocks(outputs=40, inputs=48, block=(16, 16)):
    shape = (-(-outputs // block[0]), -(-inputs // block[1]))
    values = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
    return Fp8Weight(values, torch.rand(shape) + 0.5, block)


def test_rounding_errors_are_half_a_step_at_most():
    weight = torch.randn(5, 64) * torch.tensor([1e-3, 1, 10, 0, 1])[:, None]
    whole = quantize_int8(weight)
    assert ((whole.dequantize(torch.float32) - weight).abs() <= weight.abs().amax(1, True) / 254 * 1.001 + 1e-30).all()
    eighth = quantize_fp8(weight)
    error = (eighth.dequantize(torch.float32) - weight).abs()
    assert (error <= weight.abs() / 16 * 1.001 + weight.abs().amax(1, True) / 448 / 512 + 1e-30).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [True, False])
def test_groups_share_scale_and_zero(bits, zeros):
    weight = grouped(bits=bits, zeros=zeros)
    assert weight.shape == (6, 64)
    found = weight.dequantize(torch.float32)
    for out, column in ((0, 0), (3, 17), (5, 63)):
        byte = int(weight.values[out, column * bits // 8])
        value = byte if bits == 8 else (byte >> 4 if column % 2 else byte & 15)
        zero = (8 if bits == 4 else 128) if weight.zeros is None else int(weight.zeros[out, column // 16])
        assert found[out, column] == pytest.approx((value - zero) * float(weight.scales[out, column // 16]))


def test_columns_come_back_from_an_order_of_their_own():
    order = torch.randperm(64)
    weight = grouped(order=order)
    straight = dataclasses.replace(weight, order=None).dequantize(torch.float32)
    assert torch.equal(weight.dequantize(torch.float32)[:, order], straight)
    with pytest.raises(PartError, match="act-order"):
        weight.part(Part(1, 0, 32))


@pytest.mark.parametrize(
    "weight", [quantize_int8(torch.randn(32, 48)), quantize_fp8(torch.randn(32, 48)), grouped(32, 64), blocks(32, 48)]
)
def test_parts_and_joins_are_those_of_what_they_stand_for(weight):
    whole, inputs = weight.dequantize(torch.float32), weight.shape[1]
    halves = [weight.part(Part(0, 0, 16)), weight.part(Part(0, 16, 32))]
    assert torch.equal(halves[0].join(halves[1:]).dequantize(torch.float32), whole)
    columns = [weight.part(Part(1, 0, 32)), weight.part(Part(1, 32, inputs))]
    assert torch.equal(torch.cat([half.dequantize(torch.float32) for half in columns], 1), whole)
    assert sum(half.nbytes for half in halves) == weight.nbytes


@pytest.mark.parametrize("weight", [grouped(), blocks()])
def test_what_shares_a_scale_stays_together(weight):
    with pytest.raises(PartError, match="share a scale"):
        weight.part(Part(1, 0, 24))


def test_weights_of_different_kinds_do_not_join():
    one = quantize_int8(torch.randn(4, 8))
    assert one.join([quantize_fp8(torch.randn(4, 8))]) is None
    assert one.join([dataclasses.replace(one, activation=None)]) is None
    static = [
        dataclasses.replace(one, activation=StaticActivation(torch.tensor([scale]))) for scale in (0.5, 0.5, 0.25)
    ]
    assert static[0].join(static[1:2]) is not None
    assert static[0].join(static[1:]) is None
    assert grouped(zeros=False).join([grouped()]) is None
    assert blocks(40).join([blocks(40)]) is None  # the first one's last block is not whole


def test_products_of_whole_numbers():
    weight = quantize_int8(torch.randn(24, 64))
    x, bias = torch.randn(5, 64), torch.randn(24)
    scales = x.abs().amax(1, True) / 127
    expected = (x / scales).round() * scales @ weight.dequantize(torch.float32).T + bias
    torch.testing.assert_close(Int8Linear(weight, bias)(x), expected)


def test_products_with_a_scale_found_before():
    values, scales = torch.randint(-127, 128, (8, 64), dtype=torch.int8), torch.rand(8) / 100
    offset, step = torch.tensor([3.0]), torch.tensor([0.02])
    correction = (-3 * values.int().sum(1)).to(torch.int32)
    weight = Int8Weight(values, scales, StaticActivation(step, offset), correction)
    x = torch.randn(5, 64)
    rounded = ((x / step).round() + 3).clamp(-128, 127).sub(3) * step
    torch.testing.assert_close(Int8Linear(weight, None)(x), rounded @ weight.dequantize(torch.float32).T)
    assert weight.part(Part(1, 32, 64)).correction is None
    shifted = Int8Weight(values, scales, StaticActivation(step, offset), correction + 500)
    torch.testing.assert_close(shifted.constant(), 500 * step * scales, rtol=1e-3, atol=1e-4)
    assert weight.part(Part(0, 0, 4)).constant().shape == (4,)


@pytest.mark.parametrize("exact", [True, False])
def test_sums_of_whole_numbers_are_exact_however_they_are_made(exact, monkeypatch):
    if not exact:
        monkeypatch.setattr(int8, "sums_are_exact", lambda: False)
    whole = torch.randint(-128, 128, (17, 96), dtype=torch.int8)
    values = torch.randint(-128, 128, (96, 40), dtype=torch.int8)
    assert exact_products(whole, values).equal((whole.long() @ values.long()).int())
    weight = Int8Weight(torch.full((8, 64), 127, dtype=torch.int8), torch.ones(8))
    linear = Int8Linear(weight, None)
    assert linear(torch.full((3, 64), 127.0)).equal(torch.full((3, 8), 127.0 * 127 * 64))
    if not exact:
        assert linear.extra_bytes == 2 * weight.values.nbytes


def test_int8_products_are_exact_on_a_processor_without_vnni():
    """oneDNN reads its limit once, at the first product, so each in a fork of a process that has made none."""
    program = (
        "import os, torch; from kernels.weights.quantization.int8 import exact_products as f\n"
        "for isa in ('AVX2', 'AVX512_CORE', 'DEFAULT'):\n"
        "    if os.fork():\n"
        "        assert not os.wait()[1]\n"
        "        continue\n"
        "    os.environ['ONEDNN_MAX_CPU_ISA'] = isa\n"
        "    for rows in (1, 3, 32):\n"
        "        x, y = torch.full((rows, 64), 127, dtype=torch.int8), torch.full((64, 48), -127, dtype=torch.int8)\n"
        "        assert (f(x, y) == -127 * 127 * 64).all(), (isa, rows)\n"
        "    break\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
