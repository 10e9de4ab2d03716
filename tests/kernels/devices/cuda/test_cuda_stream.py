"""Products of one token that add to the residual stream, and those of its norm, against kernels that do each apart."""

from __future__ import annotations

import pytest
import torch
import triton
from torch import Tensor

from kernels.devices.cuda.elementwise.norms import Before, CudaNorm
from kernels.devices.cuda.matmul import linear as products
from kernels.devices.cuda.matmul.linear import CudaLinear
from kernels.devices.cuda.matmul.norm_then_linear import CudaNormThenLinear
from kernels.devices.cuda.matmul.residual_linear import CudaResidualLinear

DTYPES = [torch.float32, torch.float16]
SHAPES = [(96, 48), (33, 1024), (64, 5120)]


def made(device, dtype, outputs, inputs, biased, gated=False) -> CudaLinear:
    torch.manual_seed(2)
    rows = 2 * outputs if gated else outputs
    weight = (torch.randn(rows, inputs) / inputs**0.5).to(dtype).to(device)
    return CudaLinear(weight, torch.randn(rows).to(dtype).to(device) if biased else None, gated=gated)


def tokens(device, dtype, *widths, count=1) -> list[Tensor]:
    return [torch.randn(count, width).to(dtype).to(device) for width in widths]


class Unasked(CudaNorm):
    """A norm that is to be made by another's kernel."""

    def _launch(self, x, residual, adds):
        raise AssertionError("launched")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_product_adds_to_the_stream(device, dtype, biased, outputs, inputs):
    linear = made(device, dtype, outputs, inputs, biased)
    x, residual = tokens(device, dtype, inputs, outputs)
    kept = residual.clone()
    unadded, stream = CudaResidualLinear(linear)(x, residual)
    assert unadded is None
    assert torch.equal(stream, linear(x) + residual)
    assert torch.equal(residual, kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(38, 4096), (3, 2560)])
def test_a_product_of_whole_rows_adds_to_the_stream(device, dtype, biased, outputs, inputs):
    linear = made(device, dtype, outputs, inputs, biased)
    x, residual = tokens(device, dtype, inputs, outputs)
    assert products._tiling(inputs, False, False, True)[1] >= inputs > products._tiling(inputs, False, False, False)[1]
    _, stream = CudaResidualLinear(linear)(x, residual)
    bias = None if linear.bias is None else linear.bias.double()
    expected = torch.nn.functional.linear(x.double(), linear.weight.double(), bias) + residual.double()
    assert stream.shape == (1, outputs)
    assert (stream.double() - expected).norm() <= (2e-6 if dtype == torch.float32 else 1e-3) * expected.norm()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_of_many_tokens_adds_to_the_stream(device, dtype):
    linear = made(device, dtype, 64, 48, False)
    x, residual = tokens(device, dtype, 48, 64, count=products._SUMMED)
    expected = x.double() @ linear.weight.double().T + residual.double()
    unadded, stream = CudaResidualLinear(linear)(x, residual)
    assert unadded is None
    assert stream is residual  # whose place its sum takes
    assert (stream.double() - expected).norm() <= (2e-6 if dtype == torch.float32 else 1e-3) * expected.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_product_norms_the_stream(device, dtype, biased, gated, outputs, inputs):
    linear = made(device, dtype, outputs, inputs, biased, gated)
    (stream,) = tokens(device, dtype, inputs)
    gain = (1 + torch.rand(inputs)).to(dtype).to(device)
    found, same = CudaNormThenLinear(Unasked(gain, 0.5), linear, None).add(None, stream)
    assert same is stream
    wide = stream.double()
    normed = wide * torch.rsqrt(wide.square().mean() + 0.5) * gain.double()
    bias = None if linear.bias is None else linear.bias.double()
    expected = torch.nn.functional.linear(normed, linear.weight.double(), bias)
    if gated:
        expected = torch.nn.functional.silu(expected[:, :outputs]) * expected[:, outputs:]
    assert found.shape == (1, outputs)
    assert (found.double() - expected).norm() <= (2e-5 if dtype == torch.float32 else 2e-3) * expected.norm()


def test_what_is_left_to_kernels_of_their_own(device):
    """Several tokens, a stream of another dtype or of columns apart, and inputs that are left to cuBLAS; of many tokens
    those with a bias as well."""
    many = products._SUMMED
    linear, uneven = (made(device, torch.float16, 64, inputs, False) for inputs in (128, 120))
    for layer, x, residual in (
        (linear, *tokens(device, torch.float16, 128, 64, count=65)),
        (linear, *tokens(device, torch.float16, 128), *tokens(device, torch.float32, 64)),
        (linear, *tokens(device, torch.float16, 128), tokens(device, torch.float16, 128)[0][:, ::2]),
        (uneven, *tokens(device, torch.float16, 120, 64)),
        (linear, *tokens(device, torch.float16, 128, 64, count=many - 1)),
        (made(device, torch.float16, 64, 128, True), *tokens(device, torch.float16, 128, 64, count=many)),
        (
            linear,
            *(
                one[:, :width]
                for one, width in zip(tokens(device, torch.float16, 128, 96, count=many), (128, 64), strict=True)
            ),
        ),
    ):
        unadded, stream = CudaResidualLinear(layer)(x, residual)
        assert torch.equal(unadded, layer(x))
        assert stream is residual
    for layer, inputs, count in ((linear, 128, 65), (uneven, 120, 1)):
        (stream,) = tokens(device, torch.float16, inputs, count=count)
        norm = CudaNorm(torch.ones(inputs, dtype=torch.float16, device=device), 1e-5)
        found, same = CudaNormThenLinear(norm, layer, None).add(None, stream)
        assert torch.equal(found, layer(norm(stream)))
        assert same is stream
    assert linear.fused_with_norm(x, Before(x, norm.weight, 1e-5)) == {}  # a sum is made before it
    other = CudaResidualLinear(lambda x: x + 1)
    unadded, stream = other(x, residual)
    assert torch.equal(unadded, x + 1)
    assert stream is residual


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="only the interpreter can tell")
@pytest.mark.parametrize("way", ["adds", "norms"])
def test_the_stream_is_read_when_the_kernel_in_front_has_ended(way, monkeypatch):
    device, dtype = torch.device("cpu"), torch.float32
    linear = made(device, dtype, 32, 128, False, gated=way == "norms")
    x, residual = tokens(device, dtype, 128, 32)
    before = Before(None, 1 + torch.rand(128), 1e-5)

    def run() -> Tensor:
        return linear.into(x, residual, None)[1] if way == "adds" else linear.fused_with_norm(x, before)["within"]()[0]

    right, given, waits = run(), [part.clone() for part in (x, residual)], []

    def begin() -> None:
        for part in (x, residual):
            part.fill_(torch.nan)

    def wait() -> None:
        waits.append(None)
        for part, value in zip((x, residual), given, strict=True):
            part.copy_(value)

    monkeypatch.setattr(products, "overlapping", lambda _: True)
    monkeypatch.setattr(products, "gdc_launch_dependents", begin)
    monkeypatch.setattr(products, "gdc_wait", wait)
    assert torch.equal(run(), right)
    assert waits
