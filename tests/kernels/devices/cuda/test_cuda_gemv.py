"""Products of one token and 8-bit or 4-bit weights, on a GPU or in Triton's interpreter (see ``plain``)."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.devices.cuda.elementwise.norms import Before
from kernels.devices.cuda.matmul import gemv_quantized, packing
from kernels.devices.cuda.matmul.autotune import made
from kernels.weights.quantization.weights import GroupedWeight
from tests.kernels.devices.cuda.plain import single_in_triton
from tests.kits.cuda.matrices import expected_product, weights


@pytest.fixture(scope="module")
def products(tmp_path_factory):
    return gemv_quantized if torch.cuda.is_available() else single_in_triton(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ["int8", "fp8", "nibbles", "zeros", "brain"])
@pytest.mark.parametrize(("outputs", "inputs"), [(72, 768), (40, 5120), (24, 14336)])
def test_products_of_one_token(outputs, inputs, kind, gated, normed, device, products):
    if kind == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("the device has no numbers of e4m3")
    torch.manual_seed(outputs)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    weight, form = weights(kind, outputs, inputs, device)
    bias = torch.randn(outputs).to(dtype).to(device)
    x, residual = (torch.randn(2, 1, inputs) / math.sqrt(inputs)).to(dtype).to(device)
    x[0, 5] *= 100  # what shares its scale is not lost
    gain = ((torch.randn(inputs) + 1) / math.sqrt(inputs)).to(dtype).to(device)
    before = Before(residual, gain, 1e-5) if normed else None
    expected = expected_product(weight, x, bias, gated, before)
    width = packing.tile_words(weight) if isinstance(weight, GroupedWeight) else 64
    every = gemv_quantized.tilings(form, gated)
    for name, cut in every.items() if device.type == "cuda" else list(every.items())[-1:]:
        found, summed = products.multiply(x, form, bias, gated, width, cut, before)
        assert (found.float() - expected).norm() < 0.006 * expected.norm(), name
        if normed:
            torch.testing.assert_close(summed, x + residual, rtol=1e-3, atol=0)


@pytest.mark.parametrize("nonfinite", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["int8", "fp8", "nibbles"])
def test_a_token_that_is_not_finite_stays_so(kind, nonfinite, device, products):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    _, form = weights(kind, 96, 768, device)
    x, gain = torch.randn(1, 768).to(dtype).to(device), torch.ones(768).to(dtype).to(device)
    x[0, 3] = nonfinite
    for before in (None, Before(torch.ones_like(x), gain, 1e-5)):
        cut = gemv_quantized.tilings(form, False)["rows of a warp"]
        assert not products.multiply(x, form, None, False, 64, cut, before)[0].isfinite().any()


def test_a_way_that_cannot_be_made_is_left_out(caplog):
    def nonfinite() -> torch.Tensor:
        raise RuntimeError("no such instruction")

    product = torch.ones(2)
    assert list(made(("16 bits", 4), {"first": lambda: product, "second": nonfinite})) == ["first"]
    assert "second" in caplog.text
    assert "no such instruction" in caplog.text
    with pytest.raises(RuntimeError, match="no such instruction"):
        made(("16 bits", 4), {"first": nonfinite, "second": lambda: product})
