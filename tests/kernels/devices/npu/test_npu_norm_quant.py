"""Norms that round what goes into the projection behind them, on simulated A2 and A3 (on_a5.py has A5's)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch_npu

from kernels.contract.config import RunnerConfig
from kernels.devices.elementwise import BiasedNorm
from kernels.devices.linear import NormThenLinear
from kernels.devices.npu.device import NpuDevice
from kernels.devices.npu.norm_quant import NpuGated, NpuNormThenLinear
from kernels.devices.npu.operators import NpuNorm, swiglu
from kernels.devices.npu.quantized import NpuInt8Linear, NpuStaticLinear
from kernels.devices.npu.soc import Soc
from kernels.devices.npu_simulator.activate import active
from kernels.devices.npu_simulator.constraints import ConstraintError
from kernels.weights.quantization.weights import StaticActivation, quantize_int8
from tests.kits.simulated_npu import SPEC

pytestmark = pytest.mark.skipif(SPEC.upper().startswith("A5"), reason="the vendor has them for A2 and A3")

BF16 = torch.bfloat16
A3 = Soc("A3", "Ascend910_9391")
DYNAMIC, STATIC = "npu_add_rms_norm_dynamic_quant", "npu_add_rms_norm_quant"
ALONE = ("npu_dynamic_quant", "npu_quantize")


def called(names):
    return [active().engine.calls.get(f"npu.{name}.default", 0) for name in names]


def layer(static, inputs=96, scale=0.03125):
    weight = quantize_int8(torch.randn(64, inputs, generator=torch.Generator().manual_seed(5)) / 10)
    if not static:
        return NpuInt8Linear(weight.to(torch.device("npu")), None, A3)
    activation = StaticActivation(torch.tensor([scale]), torch.tensor([11.0]))
    correction = -11 * weight.values.int().sum(1)
    weight = dataclasses.replace(weight, activation=activation, correction=correction.to(torch.int32))
    return NpuStaticLinear(weight.to(torch.device("npu")), None, A3)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_one_kernel_gives_what_two_do(static, biased, gated):
    """But for the rounding of the norm to 16 bits between them."""
    generator = torch.Generator().manual_seed(7)
    gamma = (1 + torch.randn(96, generator=generator) / 8).to(BF16).npu()
    norm = NpuNorm(gamma, 1e-5)
    if biased:
        bias = torch.randn(96, generator=generator).to(BF16).npu()
        norm = BiasedNorm(NpuDevice(RunnerConfig(model_path="")).elementwise, norm, bias)
    linear = NpuGated(layer(static), swiglu) if gated else layer(static)
    assert NpuNormThenLinear.fits(norm, linear, A3)
    x, residual = (torch.randn(5, 96, generator=generator).to(BF16).npu() for _ in range(2))
    before = called((DYNAMIC, STATIC, *ALONE))
    found, total = NpuNormThenLinear(norm, linear).add(x, residual)
    calls = [now - then for now, then in zip(called((DYNAMIC, STATIC, *ALONE)), before, strict=True)]
    assert calls == [not static, static, 0, 0]
    expected, theirs = NormThenLinear(norm, linear).add(x, residual)
    assert total.cpu().equal(theirs.cpu())
    assert found.shape == (5, 32 if gated else 64)
    torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=0.05, atol=0.05)
    exact = NormThenLinear(norm, linear)(total)  # without an addition: the norm, then what rounds
    torch.testing.assert_close(found.cpu(), exact.cpu(), rtol=0.05, atol=0.05)


def test_where_there_is_a_kernel_for_both():
    gamma = torch.ones(96, dtype=BF16).npu()
    norm = NpuNorm(gamma, 1e-6)
    assert NpuNormThenLinear.fits(norm, layer(False), Soc("A2", "Ascend910B3"))
    assert not NpuNormThenLinear.fits(norm, layer(False), Soc("A5", "Ascend950"))
    assert not NpuNormThenLinear.fits(norm, lambda x: x, A3)
    assert not NpuNormThenLinear.fits(lambda x: x, layer(False), A3)
    narrow = NpuNorm(torch.ones(40, dtype=BF16).npu(), 1e-6)  # 80 bytes
    assert NpuNormThenLinear.fits(narrow, layer(False, 40), A3)
    assert not NpuNormThenLinear.fits(narrow, layer(True, 40), A3)
    assert NpuNormThenLinear.fits(norm, layer(True), A3)
    assert not NpuNormThenLinear.fits(norm, layer(True, scale=0.03), A3)  # which bfloat16 does not have


def test_what_the_operators_do_not_take():
    x, gamma = torch.ones(3, 96, dtype=BF16).npu(), torch.ones(96, dtype=BF16).npu()
    scales, zeros = torch.ones_like(gamma), torch.zeros_like(gamma)
    static, dynamic = torch_npu.npu_add_rms_norm_quant, torch_npu.npu_add_rms_norm_dynamic_quant
    for wrong, says in (
        (lambda: dynamic(x.float(), x.float(), gamma.float()), "x1: must be float16, bfloat16"),
        (lambda: dynamic(x, x, gamma.float()), "dtypes must be equal"),
        (lambda: dynamic(x, x, gamma, beta=gamma.float()), "beta: must be bfloat16"),
        (lambda: dynamic(x, x, gamma, smooth_scale1=gamma), "smooth_scale1: is not simulated"),
        (lambda: dynamic(x[0], x[0], gamma), "two dimensions or more"),
        (lambda: static(x, x, gamma, scales[:1], zeros), "scales1: must be \\[96\\]"),
        (lambda: static(x, x, gamma, scales.float(), zeros), "scales1: must be bfloat16"),
        (lambda: static(x, x, gamma, scales, zeros.int()), "zero_points1: must be bfloat16"),
        (lambda: static(x.half(), x.half(), gamma.half(), scales, zeros), "scales1: must be float32"),
        (lambda: static(x.half(), x.half(), gamma.half(), scales.float(), zeros), "zero_points1: must be int32"),
        (lambda: static(x, x, gamma, scales, zeros, div_mode=False), "div_mode: False is not simulated"),
        (lambda: static(*(one[..., :40] for one in (x, x, gamma, scales, zeros))), "rows of a multiple of 32 bytes"),
    ):
        with pytest.raises(ConstraintError, match=says):
            wrong()
