"""The CPU's native products with whole weights of which groups share a scale."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

from app.understudy import MODEL_DIR
from kernels.devices.cpu.capture import CpuCapture
from kernels.devices.cpu.dense_linear import NativeLinear
from kernels.devices.cpu.operators import Native
from kernels.weights.quantization.packed import grouped
from kernels.weights.quantization.tokens import fake_quantize_tokens
from kernels.weights.quantization.weights import quantize_int8
from tests.kits.modelslim import write
from tests.kits.native import compiled, needs_native, platform
from tests.kits.quantized import rewrite
from tests.kits.quantized_words import Rounded, gptq
from tests.kits.rounded_once import assert_only_rounded_once, assert_weights_rounded_once

__all__ = ["compiled", "platform"]

pytestmark = [needs_native, pytest.mark.usefixtures("compiled")]


def weight_of(outputs, inputs, bits, group, shuffled=False, symmetric=False):
    made = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs + bits))
    rounded = Rounded.of(made, bits, group, symmetric, shuffled)
    order = rounded.index.argsort(stable=True) if shuffled else None
    values = rounded.values.to(torch.uint8)
    zeros = None if symmetric else rounded.zeros.to(torch.uint8)
    return grouped(values if order is None else values[:, order], rounded.scales, zeros, bits, order), rounded.floats()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("outputs", "inputs", "group"), [(384, 1024, 128), (33, 64, 32), (100, 192, 64), (48, 288, 96), (32, 256, 256)]
)
def test_products_are_those_of_what_the_weight_stands_for(outputs, inputs, group, bits, platform):
    for shuffled in (False, True):
        weight, floats = weight_of(outputs, inputs, bits, group, shuffled, symmetric=not shuffled)
        torch.testing.assert_close(weight.dequantize(torch.float32), floats)
        bias = torch.randn(outputs).bfloat16()
        linear = platform.linear.make_quantized(weight, bias)
        for ways in ((1, 2, 3, 4), (5, 16, 20), (33, 70, 140)):
            alone = None
            for rows in ways:
                x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).bfloat16()
                alone = x[:1].clone() if alone is None else alone
                x[0] = alone[0]
                found = linear(x)
                if rows < 5 or (rows < 33 and bits == 4 and group >= 128):
                    assert_only_rounded_once(found, x, floats, bias)
                else:
                    assert_weights_rounded_once(found, x, floats, bias)
                assert torch.equal(found[:1], linear(x[: ways[0]])[:1]), "a row's result depends on the rows around it"
                if outputs % 64 == 0:
                    assert torch.equal(linear.gated(x), platform.elementwise.silu_and_mul(found))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_token_that_is_not_finite_leaves_the_others_alone(bits, platform):
    linear = platform.linear.make_quantized(weight_of(64, 256, bits, 64)[0], None)
    for rows in (4, 8, 40):
        x = torch.randn(rows, 256).bfloat16()
        x[2] = 0
        others, expected = [0, *range(2, rows)], linear(x)
        assert (expected[2] == 0).all()
        for wrong in (torch.nan, -torch.inf):
            x[1, 37] = wrong
            found = linear(x)
            assert not found[1].isfinite().any()
            assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("bits", [4, 8])
def test_what_becomes_of_zeros_does_not_add_up(bits, platform):
    """Weights of mostly zeros, with groups of larger scales, and inputs of one sign."""
    middle = 1 << (bits - 1)
    values = torch.randint(1, 2 * middle, (64, 2048))
    values = torch.where(torch.rand(64, 2048) < 0.9, middle, values).to(torch.uint8)
    scales = torch.where(torch.rand(64, 64) < 0.02, 10.0, 1.0) / middle
    weight = grouped(values, scales, None, bits)
    for rows in (20, 40):
        x = torch.randn(rows, 2048).abs().bfloat16()
        assert_weights_rounded_once(
            platform.linear.make_quantized(weight, None)(x), x, weight.dequantize(torch.float32), None
        )


def test_int8_weights_alone_are_one_group(platform, caplog):
    weight = dataclasses.replace(quantize_int8(torch.randn(96, 160)), activation=None)
    x = torch.randn(3, 160).bfloat16()
    with caplog.at_level(logging.WARNING, "troupe.kernels"):
        found = platform.linear.make_quantized(weight, None)(x)
    assert not caplog.records
    assert_only_rounded_once(found, x, weight.dequantize(torch.float32), None)


def test_weights_wait_until_products_are_compiled(platform, monkeypatch, caplog):
    """Rather than be held as floats as well."""
    weight, floats = weight_of(64, 128, 4, 32)
    x = torch.randn(3, 128).bfloat16()
    platform.native.current = None
    dense = platform.linear.make_dense(torch.ones(64, 128).bfloat16(), None)
    waited = []

    class Compiling:
        def wait(self):
            waited.append(True)

        def poll(self):
            return 0 if waited else None

    platform.native.building = Compiling()
    monkeypatch.setattr(type(weight), "dequantize", lambda *args: pytest.fail("it was made floats of"))
    linear = platform.linear.make_quantized(weight, None)
    assert waited
    assert_only_rounded_once(linear(x), x, floats, None)
    assert isinstance(dense.call, NativeLinear), "what was made before went over, too"


def test_without_a_compiler_the_weight_is_dequantized(platform, caplog):
    weight, floats = weight_of(64, 128, 4, 32)
    x = torch.randn(3, 128).bfloat16()
    platform.native.current = None
    with caplog.at_level(logging.WARNING, "troupe.kernels"):
        linear = platform.linear.make_quantized(weight, None)
    assert "GroupedWeight is dequantized" in caplog.text
    assert "need AVX2 or NEON" in caplog.text
    torch.testing.assert_close(linear(x).float(), x.float() @ floats.t(), rtol=3e-2, atol=0.2)


def test_what_is_counted_is_what_is_in_memory(platform):
    weight, _ = weight_of(64, 128, 4, 32)
    linear = platform.linear.make_quantized(weight, None)
    assert weight.nbytes + platform.linear.dequantized_bytes == linear.nbytes


def test_tokens_are_rounded_as_by_torch(platform):
    x = torch.randn(70, 96, generator=torch.Generator().manual_seed(8)).bfloat16()
    x[3], x[4, 7], x[5, 2], x[6, 95] = 0, float("nan"), float("inf"), 1e-38
    wide = torch.empty(70, 128, dtype=torch.bfloat16)
    wide[:, :96] = x
    assert isinstance(platform.native.current, Native)
    for given in (x, wide[:, :96], x[:1]):
        torch.testing.assert_close(
            platform.linear.fake_quantize(given), fake_quantize_tokens(given), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("layout", ["gptq", "modelslim"])
def test_decodes_of_4_bits_run_as_one_program(layout, drive, monkeypatch, tmp_path):
    """With inputs in floats, and with those that are rounded to 8 bits."""
    if layout == "gptq":
        settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
        path = rewrite(MODEL_DIR, tmp_path / "q", gptq(4, 32, shuffled=True), settings)
    else:
        path, _ = write(MODEL_DIR, tmp_path, lambda module: "W4A8_DYNAMIC", group=32)
    prompt = list(range(40, 72))
    quantized = drive(path, dtype="bfloat16")
    quantized.admit(1, prompt)
    tokens = quantized.generate(1, 48)
    assert quantized.info.graph_rows
    monkeypatch.setattr(CpuCapture, "decodes", lambda *args, **options: None)
    monkeypatch.setattr(CpuCapture, "native_pass", lambda *args, **options: None)
    one_by_one = drive(path, dtype="bfloat16")
    assert not one_by_one.info.graph_rows
    one_by_one.admit(1, prompt)
    assert one_by_one.generate(1, 48) == tokens
    assert quantized.info.weight_bytes < 0.5 * drive(MODEL_DIR, dtype="bfloat16").info.weight_bytes
