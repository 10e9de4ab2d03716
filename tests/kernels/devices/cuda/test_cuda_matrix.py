"""One token by weights of 4 bits on the matrix unit, on a GPU, or by Triton's interpreter as ``plain`` says."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.devices.cuda.elementwise.norms import Before
from kernels.devices.cuda.matmul import gemv_int4_mma, gemv_quantized
from kernels.devices.cuda.matmul.gemm_small_quantized import Form
from kernels.devices.cuda.matmul.number_conversions import BYTES, NIBBLES
from tests.kernels.devices.cuda.plain_matrix import matrix_in_triton
from tests.kits.cuda.matrices import wanted_of, weights


@pytest.fixture(scope="module")
def products(tmp_path_factory):
    return gemv_int4_mma if torch.cuda.is_available() else matrix_in_triton(tmp_path_factory.mktemp("plain"))


def given(device, inputs):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    x, residual = (torch.randn(2, 1, inputs) / math.sqrt(inputs)).to(dtype).to(device)
    gain = ((torch.randn(inputs) + 1) / math.sqrt(inputs)).to(dtype).to(device)
    return dtype, x, Before(residual, gain, 1e-5)


@pytest.mark.parametrize(
    ("gated", "normed", "biased"), [(False, False, False), (False, True, True), (True, True, True)]
)
@pytest.mark.parametrize("kind", ["nibbles", "zeros", "brain"])
def test_products_of_one_token(kind, gated, normed, biased, device, products, monkeypatch):
    """Three blocks of rows by two programs, the last of them not whole."""
    monkeypatch.setattr(products, "multiprocessors", lambda device: 1)
    torch.manual_seed(7)
    outputs, inputs = 42, 768
    dtype, x, before = given(device, inputs)
    x[0, 5] *= 100  # what shares its scale is not lost
    weight, form = weights(kind, outputs, inputs, device)
    bias = torch.randn(outputs).to(dtype).to(device) if biased else None
    before = before if normed else None
    found, summed = products.rows_in_turn(x, form, bias, gated, before)
    wanted = wanted_of(weight, x, torch.zeros(outputs, device=device) if bias is None else bias, gated, before)
    assert (found.float() - wanted).norm() < 0.006 * wanted.norm()
    if normed:
        torch.testing.assert_close(summed, x + before.residual, rtol=1e-3, atol=0)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_token_that_is_not_finite_stays_so(broken, device, products):
    _, x, before = given(device, 768)
    _, form = weights("nibbles", 16, 768, device)
    x[0, 3] = broken
    for norm in (None, before):
        assert not products.rows_in_turn(x, form, None, False, norm)[0].isfinite().any()


def test_where_there_are_many_rows():
    def form(outputs, inputs, kind=NIBBLES):
        return Form(kind, torch.empty(outputs, inputs // 4, dtype=torch.int16, device="meta"), torch.empty(0))

    assert gemv_int4_mma.suits(form(28672, 4096), True, 64)
    assert not gemv_int4_mma.suits(form(14336, 4096), True, 64)
    assert not gemv_int4_mma.suits(form(6144, 4096), False, 64)
    assert not gemv_int4_mma.suits(form(14336, 8192), False, 64)
    assert not gemv_int4_mma.suits(form(28672, 4096), True, 32)
    assert not gemv_int4_mma.suits(form(28672, 4096, BYTES), True, 64)
    x, before = torch.empty(1, 4096), Before(torch.empty(1, 4096), torch.empty(4096), 1e-5)
    for width, name in ((64, "matrix unit"), (32, "rows in turn")):
        wide = form(28672, 4096)
        for ways in (
            gemv_quantized.ways(x, wide, None, True, width),
            gemv_quantized.fused(x, wide, None, True, width, before),
        ):
            assert [way for way in ways if way in ("matrix unit", "rows in turn")] == [name]
