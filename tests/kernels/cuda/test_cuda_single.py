"""One token by weights of 8 and 4 bits, on a GPU: Gluon has no interpreter. That it compiles is tested elsewhere."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import silu

from kernels.cuda import packing, single, skinny
from kernels.cuda.choosing import made
from kernels.cuda.numbers import BYTES, EIGHTHS
from kernels.cuda.skinny import Form
from kernels.quantization.weights import GroupedWeight, quantize_fp8, quantize_int8


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


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ["int8", "fp8", "nibbles", "zeros", "brain"])
@pytest.mark.parametrize(("outputs", "inputs"), [(200, 768), (1000, 1536), (96, 14336)])
def test_products_of_one_token(outputs, inputs, kind, gated, device):
    torch.manual_seed(outputs)
    weight, form = weights(kind, outputs, inputs, device)
    x, bias = (
        torch.randn(1, inputs).bfloat16().to(device) / math.sqrt(inputs),
        torch.randn(outputs).bfloat16().to(device),
    )
    x[0, 5] *= 100  # what shares its scale is not lost
    if not skinny.single_suits(form, x):
        pytest.skip("the device has no such products")
    wanted = (x.double() @ weight.dequantize(torch.float64).T + bias.double()).float()
    if gated:
        gate, up = wanted.chunk(2, 1)
        wanted = silu(gate) * up
    width = packing.tile_words(weight) if isinstance(weight, GroupedWeight) else 64
    found = single.multiply(x, form, bias, gated, width).float()
    assert (found - wanted).norm() < 0.006 * wanted.norm()
    for broken in (torch.nan, torch.inf):
        x[0, 3] = broken
        assert not single.multiply(x, form, bias, gated, width).isfinite().any()


def test_a_way_that_cannot_be_made_is_left_out(caplog):
    def broken() -> torch.Tensor:
        raise RuntimeError("no such instruction")

    product = torch.ones(2)
    assert list(made(("16 bits", 4), {"first": lambda: product, "second": broken})) == ["first"]
    assert "second" in caplog.text
    assert "no such instruction" in caplog.text
    with pytest.raises(RuntimeError, match="no such instruction"):
        made(("16 bits", 4), {"first": broken, "second": lambda: product})
