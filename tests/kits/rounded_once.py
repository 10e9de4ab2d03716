"""Checks the precision of native products with quantized weights."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["assert_only_rounded_once", "assert_weights_rounded_once"]

TOKENS = 5e-5
"""A token's values are rounded to a 65,000th of the largest in their block."""


def assert_only_rounded_once(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Check that ``found`` bf16 is ``x @ weight.T + bias`` for an unrounded ``weight`` float32 [outputs, inputs]."""
    wide, exact = x.double(), weight.double().t()
    expected = wide @ exact
    if bias is not None:
        expected += bias.double()
    half_a_step = 2.0 ** (torch.frexp(expected).exponent - 9)
    allowed = half_a_step + TOKENS * (wide.abs() @ exact.abs())
    worst = ((found.double() - expected).abs() / allowed).max()
    assert worst <= 1, f"{float(worst):.2f} times as far from the exact product as its rounding"


def assert_weights_rounded_once(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Check that ``found`` bf16 is, on average, not further from the exact product than the product with the weight in
    bf16; single elements are rounded differently.
    """
    wide, plus = x.double(), 0.0 if bias is None else bias.double()
    exact = wide @ weight.double().t() + plus
    rounded = (wide @ weight.bfloat16().double().t() + plus).bfloat16()
    errors = [(result.double() - exact).square().mean().sqrt() for result in (found, rounded)]
    assert errors[0] <= 1.6 * errors[1], f"{float(errors[0] / errors[1]):.2f} times the error of a weight of bf16"
