"""8-bit products on a GPU, or by Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.devices.cuda.matmul import eight_bit
from kernels.devices.cuda.matmul.eight_bit import EightBitLinear
from kernels.weights.quantization.int8 import Int8Linear
from kernels.weights.quantization.weights import quantize_fp8, quantize_int8


def close(found, expected):
    assert (found.float() - expected.float()).norm() < 0.01 * expected.float().norm()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 17, 40])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (48, 2304)])
def test_whole_numbers(rows, outputs, inputs, bias, device):
    torch.manual_seed(rows)
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16  # which the interpreter cannot multiply
    weight = dataclasses.replace(quantize_int8(torch.randn(outputs, inputs)), dtype=dtype)
    x = torch.randn(rows, inputs).to(dtype)
    added = torch.randn(outputs).to(dtype) if bias else None
    assert EightBitLinear.fits(weight, device)
    linear = EightBitLinear(weight.to(device), None if added is None else added.to(device))
    close(linear(x.to(device)).cpu(), Int8Linear(weight, added)(x))


def test_what_a_layer_is_tried_beside_takes_the_ways_that_were_chosen(device, monkeypatch):
    """Each is called in a trial of norms, where the layer itself takes the quickest."""

    class Last:
        def run(self, shape, ways, trial):
            return next(reversed(ways.values()))()

    monkeypatch.setattr(eight_bit, "spare", lambda weight: 2)
    weight = dataclasses.replace(quantize_int8(torch.randn(96, 512)), dtype=torch.float16).to(device)
    linear = EightBitLinear(weight, None, Last())
    taken = []
    monkeypatch.setattr(eight_bit.gemm_small_quantized, "multiply", lambda x, form, *_: taken.append(form) or x)
    for layer in (linear, *linear.copies()):
        layer(torch.randn(1, 512, device=device).half())
    assert len(taken) == 3
    assert len({form.words.data_ptr() for form in taken}) == 3


@pytest.mark.parametrize("nonfinite", [torch.nan, torch.inf])
def test_a_token_that_is_not_finite_stays_so(nonfinite, device):
    x = torch.randn(4, 64).bfloat16()
    x[1, 3], x[2] = nonfinite, 0
    found = EightBitLinear(quantize_int8(torch.randn(48, 64)).to(device), None)(x.to(device)).cpu()
    assert found.isfinite().all(1).tolist() == [True, False, True, True]


@pytest.mark.parametrize("rows", [1, 2, 17, 40])
def test_eighths(rows, device):
    """Within what rounding each token to e4m3 costs."""
    torch.manual_seed(rows)
    weight = quantize_fp8(torch.randn(96, 256))
    if not EightBitLinear.fits(weight, device):
        pytest.skip("the device has no products of e4m3")
    x, bias = torch.randn(rows, 256).bfloat16(), torch.randn(96).bfloat16()
    found = EightBitLinear(weight.to(device), bias.to(device))(x.to(device)).cpu().float()
    expected = x.float() @ weight.dequantize(torch.float32).T + bias.float()
    assert (found - expected).norm() < (0.005 if rows == 1 else 0.05) * expected.norm()


def test_what_does_not_fit(device):
    weight = quantize_int8(torch.randn(48, 64))
    assert not EightBitLinear.fits(dataclasses.replace(weight, activation=None), device)
    assert not EightBitLinear.fits(quantize_int8(torch.randn(48, 40)), device)
    assert not EightBitLinear.fits(dataclasses.replace(weight, dtype=torch.float32), device)
