"""The CPU's products with weights of every kind, and lookups, beside float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.devices.cpu.device import CpuDevice
from kernels.devices.cpu.quantized import CpuBlocksLinear
from kernels.weights.quantization.gguf_weight import GgufWeight
from kernels.weights.quantization.weights import (
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    QuantizedWeight,
    StaticActivation,
    quantize_fp8,
    quantize_int8,
)
from tests.kits.float64 import BF16, ROWS, assert_near, bits, device, numbers, proof, same_alone
from tests.kits.gguf_blocks import KIND, weight_of

__all__ = ["device"]

Weight = Tensor | QuantizedWeight
SUM = 2.0**-18
"""Sums in float32: 2^-24 for each of some hundred additions, relative to the sum of all magnitudes."""
TOKENS = 2.0**-15
"""Tokens as integers of 16 bits: half a step of the largest of 32 inputs, of which a step is a 32,512th."""
FACTORS = 2.0**-10
"""Scales and weights as float16 on the way to bf16, twice 2^-11, of AMX's products with integers."""


def dense(generator: torch.Generator, outputs: int, inputs: int) -> Tensor:
    return numbers(generator, outputs, inputs)


def int8(generator: torch.Generator, outputs: int, inputs: int) -> Int8Weight:
    return quantize_int8(torch.randn(outputs, inputs, generator=generator))


def int8_static(generator: torch.Generator, outputs: int, inputs: int) -> Int8Weight:
    weight = int8(generator, outputs, inputs)
    correction = torch.randint(-9999, 9999, (outputs,), dtype=torch.int32, generator=generator)
    fixed = StaticActivation(torch.tensor([0.03]), torch.tensor([-7.0]))
    return dataclasses.replace(weight, activation=fixed, correction=correction)


def grouped(
    bits: Literal[4, 8], group: int, zeroed: bool = False, ordered: bool = False, dtype: torch.dtype = torch.float32
) -> Callable[..., GroupedWeight]:
    def make(generator: torch.Generator, outputs: int, inputs: int) -> GroupedWeight:
        values = torch.randint(0, 256, (outputs, inputs * bits // 8), dtype=torch.uint8, generator=generator)
        scales = torch.rand(outputs, inputs // group, generator=generator) / (1 << bits)
        zeros = torch.randint(0, 1 << bits, scales.shape, dtype=torch.uint8, generator=generator) if zeroed else None
        order = torch.randperm(inputs, generator=generator) if ordered else None
        return GroupedWeight(values, scales.to(dtype), zeros, group, bits, order)

    return make


def fp8_blocks(generator: torch.Generator, outputs: int, inputs: int) -> Fp8Weight:
    values = (torch.randn(outputs, inputs, generator=generator) * 50).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-outputs // 64), inputs // 128, generator=generator) + 0.1
    return Fp8Weight(values, scales, (64, 128))


def gguf(name: str) -> Callable[..., GgufWeight]:
    return lambda generator, outputs, inputs: weight_of(
        name, outputs, inputs, int(torch.randint(1 << 20, (), generator=generator))
    )


IN_BLOCKS = {f"Q{bits}_0": (32, grouped(bits, 32, dtype=torch.float16)) for bits in (4, 8)}
"""Groups that products read in blocks, as the files have them."""
KINDS: dict[str, tuple[int, Callable[..., Weight]]] = {  # inputs come in multiples of the first
    "bf16": (32, dense),
    "int8": (64, int8),
    "int8-static": (64, int8_static),
    "grouped4": (32, grouped(4, 32)),
    "grouped4-zeros": (64, grouped(4, 64, zeroed=True)),
    "grouped4-128": (128, grouped(4, 128, zeroed=True)),
    "grouped4-ordered": (32, grouped(4, 32, ordered=True)),
    "grouped8": (32, grouped(8, 32, zeroed=True)),
    "grouped8-plain": (64, grouped(8, 64)),
    **IN_BLOCKS,
    "fp8": (32, lambda *sizes: quantize_fp8(torch.randn(*sizes[1:], generator=sizes[0]))),
    "fp8-blocks": (128, fp8_blocks),
    **{name: (kind.block, gguf(name)) for name, kind in KIND.items()},
}
ALONE = ("bf16", "int8", "int8-static")
"""Products whose bits of a row do not depend on the other rows. Others treat few rows differently from many."""


def exact_of(weight: Weight, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The product float64 [rows, outputs], and how far rounding may lead from it."""
    wide = x.double()
    if isinstance(weight, Int8Weight):
        exact, noise = whole_numbers(weight, wide)
    else:
        values = weight.double() if isinstance(weight, Tensor) else weight.dequantize(torch.float32).double()
        exact, noise = wide @ values.T, wide.abs() @ values.abs().T
        if isinstance(weight, Tensor):
            noise *= SUM
        else:  # for many rows weights are rounded to bf16, for few rows tokens to integers
            largest, shared = values.abs().amax(1, keepdim=True), wide.abs().unflatten(1, (-1, 32)).amax(2).sum(1)
            noise *= BF16 + FACTORS
            noise += shared[:, None] * 32 * largest.T * TOKENS
    return (exact, noise) if bias is None else (exact + bias.double(), noise + bias.double().abs() * 2**-23)


def whole_numbers(weight: Int8Weight, x: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens are rounded to integers, as the reference rounds them but where they are half between two."""
    fixed = weight.activation if isinstance(weight.activation, StaticActivation) else None
    scale = x.abs().amax(1, keepdim=True) / 127 if fixed is None else fixed.scale.double()
    steps = torch.where(scale > 0, x / scale, 0.0)
    offset = 0.0 if fixed is None or fixed.offset is None else fixed.offset.double()
    held = (steps.round() + offset).clamp(-128, 127)
    values, scales = weight.values.double().T, weight.scales.double()
    sums = held @ values + (0 if weight.correction is None else weight.correction.double())
    between = ((steps - steps.floor() - 0.5).abs() < 127 * 2**-20).double() @ values.abs()
    exact = sums * scales * scale
    return exact, between * scales * scale + exact.abs() * 2**-20


@pytest.mark.parametrize("kind", KINDS)
@proof(14)
@given(data=st.data())
def test_a_product_is_that_of_float64(kind: str, device: CpuDevice, data: st.DataObject) -> None:
    unit, make = KINDS[kind]
    rows, seed = data.draw(ROWS, "rows"), data.draw(st.integers(0, 999), "seed")
    inputs, outputs = (
        unit * data.draw(st.integers(1, 1 + 640 // unit), "inputs"),
        data.draw(st.integers(1, 130), "outputs"),
    )
    wild, biased = data.draw(st.booleans(), "wild"), data.draw(st.booleans(), "biased")
    generator = torch.Generator().manual_seed(seed)
    x, weight = numbers(generator, rows, inputs, wild=wild), make(generator, outputs, inputs)
    bias = numbers(generator, outputs) if biased else None
    linear = device.linear.make_projection(weight, bias)
    found = linear(x)
    exact, noise = exact_of(weight, x, bias)
    assert_near(found, exact, noise)
    if device.native.current is not None and rows and kind in ALONE:
        same_alone(linear, x, found)
    if rows and outputs >= 32 and not wild and not biased and not isinstance(weight, Int8Weight):
        # Rounding errors of many numbers do not all add up.
        assert bool(((found.double() - exact).norm(dim=1) <= 2 * BF16 * exact.norm(dim=1)).all())


@pytest.mark.parametrize("kind", ["bf16", "int8", "grouped4", "grouped8", "fp8", "Q4_1", "Q4_K"])
@proof(10)
@given(data=st.data())
def test_a_gated_product_is_that_of_float64(kind: str, device: CpuDevice, data: st.DataObject) -> None:
    unit, make = KINDS[kind]
    rows, seed = data.draw(ROWS, "rows"), data.draw(st.integers(0, 999), "seed")
    inputs, inner = (
        unit * data.draw(st.integers(1, 1 + 320 // unit), "inputs"),
        data.draw(st.integers(1, 5), "inner") * 32,
    )
    generator = torch.Generator().manual_seed(seed)
    x, weight = numbers(generator, rows, inputs) / inputs**0.5, make(generator, 2 * inner, inputs)
    linear = device.linear.make_gated(weight, None)
    found = linear(x)
    both, noise = exact_of(weight, x, None)
    (gate, up), (gate_noise, up_noise) = both.chunk(2, 1), (noise + both.abs() * BF16).chunk(2, 1)
    silu = gate * gate.sigmoid()
    # Halves may be rounded to bf16 before; no slope of silu exceeds 1.1. One more rounding of silu by torch.
    around = 1.1 * gate_noise * (up.abs() + up_noise) + silu.abs() * up_noise + (silu * up).abs() * (BF16 + 1e-5)
    assert_near(found, silu * up, around)
    if device.native.current is not None and rows and kind in ALONE:
        same_alone(linear, x, found)


@proof(12)
@given(rows=ROWS, outputs=st.integers(1, 130), units=st.integers(1, 12), seed=st.integers(0, 99))
def test_rows_of_a_tied_weight_are_looked_up(
    device: CpuDevice, rows: int, outputs: int, units: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of the table, whichever copy of it is kept."""
    monkeypatch.setattr("kernels.devices.cpu.dense_linear.SHARED_PACK_BYTES", 0)
    generator = torch.Generator().manual_seed(seed)
    table = numbers(generator, outputs, 32 * units, wild=True)
    table[0, :3] = torch.tensor([torch.nan, -torch.inf, -0.0])
    lookup, head = device.linear.make_tied(table.clone())
    ids = torch.randint(outputs, (rows,), generator=generator)
    assert torch.equal(bits(lookup(ids)), bits(table[ids]))
    table[0, :3] = 0
    lookup, head = device.linear.make_tied(table.clone())
    x = numbers(generator, rows, 32 * units)
    assert_near(head(x), *exact_of(table, x, None))


@pytest.mark.parametrize("name", [*KIND, *IN_BLOCKS])
@proof(4)
@given(rows=ROWS, outputs=st.integers(1, 130), units=st.integers(1, 3), seed=st.integers(0, 99))
def test_rows_of_blocks_are_looked_up(
    name: str, device: CpuDevice, rows: int, outputs: int, units: int, seed: int
) -> None:
    unit, make = KINDS[name]
    generator = torch.Generator().manual_seed(seed)
    weight = make(generator, outputs, units * unit)
    assert not isinstance(weight, Tensor)
    ids = torch.randint(outputs, (rows,), generator=generator)
    lookup, head = device.linear.make_tied(weight)
    assert_near(lookup(ids), weight.dequantize(torch.float32).double()[ids], 0.0)
    if device.operators != "none":
        assert isinstance(head, CpuBlocksLinear)
        assert head.lookup == lookup  # of one copy


@pytest.mark.parametrize("inputs", [40, 33])
def test_a_product_of_odd_inputs_is_that_of_float64(inputs: int, device: CpuDevice) -> None:
    """No native product has such inputs; torch's serves them."""
    generator = torch.Generator().manual_seed(inputs)
    x, weight = numbers(generator, 9, inputs), numbers(generator, 21, inputs)
    assert_near(device.linear.make_dense(weight, None)(x), *exact_of(weight, x, None))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_leaves_the_others_alone(kind: str, wrong: float, device: CpuDevice) -> None:
    unit, make = KINDS[kind]
    generator = torch.Generator().manual_seed(3)
    weight, inputs = make(generator, 70, 2 * unit), 2 * unit
    linear = device.linear.make_projection(weight, None)
    for rows in (3, 40):
        x = numbers(generator, rows, inputs)
        expected = linear(x)
        x[1, 5] = wrong
        found = linear(x)
        others = [row for row in range(rows) if row != 1]
        assert torch.equal(bits(found[others]), bits(expected[others]))
        if kind != "int8-static":  # whose scale has no place for it
            assert not bool(found[1].isfinite().any())
