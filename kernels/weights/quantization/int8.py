"""Int8 matrix products in plain torch, for devices without their own kernels."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kernels.weights.quantization.weights import Int8Weight, StaticActivation

__all__ = ["Int8Linear", "exact_products", "round_tokens", "sums_are_exact"]

_TINY = torch.finfo(torch.float32).tiny


def round_tokens(x: Tensor, weight: Int8Weight) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` [tokens, inputs] as the weight's activation says -> int8 of the same shape, and scales f32
    [tokens, 1]. The scale of a token that is not finite is not finite."""
    wide = x.float()
    activation, amax = weight.activation, wide.abs().amax(-1, keepdim=True)
    if isinstance(activation, StaticActivation):
        whole = (wide / activation.scale).round_()
        if activation.offset is not None:
            whole += activation.offset
        scales = torch.where(amax.isfinite(), activation.scale, amax)
        return whole.clamp_(-128, 127).to(torch.int8), scales
    scales = amax.div_(127).clamp_(min=_TINY)
    return (wide / scales).round_().clamp_(-127, 127).to(torch.int8), scales


@cache
def sums_are_exact() -> bool:
    """Whether torch._int_mm is exact on this processor.

    Processors without VNNI (before Cascade Lake and Zen 4) add two products in 16 bits, which may saturate.
    """
    largest = torch.full((32, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(largest, largest.t()) == 127 * 127 * 64).all())


def exact_products(whole: Tensor, values: Tensor) -> Tensor:
    """Exact product of int8 [tokens, inputs] and int8 [inputs, outputs] -> int32 [tokens, outputs], on any
    processor."""
    return _products(whole, values, None if sums_are_exact() else _halves(values))


def _halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split ``values`` int8 into ``16 * high + low`` of 4 bits each, whose products do not saturate."""
    return values >> 4, values & 15


def _products(whole: Tensor, values: Tensor, halves: tuple[Tensor, Tensor] | None) -> Tensor:
    if halves is None:
        return torch._int_mm(whole, values)
    high, low = halves
    return torch._int_mm(whole, high).mul_(16).add_(torch._int_mm(whole, low))


class Int8Linear:
    """``x @ weight.T + bias`` in integers, by torch._int_mm. Where that could saturate, the layer also keeps each
    weight as two halves of 4 bits.

    ``extra_bytes``: memory of these halves.
    """

    def __init__(self, weight: Int8Weight, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self._values = weight.values.t()
        self._halves = None if sums_are_exact() else _halves(self._values)
        self.extra_bytes = 0 if self._halves is None else sum(half.nbytes for half in self._halves)

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.weight
        whole, scales = round_tokens(x, weight)
        sums = _products(whole, self._values, self._halves)
        if weight.correction is not None:
            sums = sums + weight.correction
        out = sums.float().mul_(scales * weight.scales)
        if self.bias is not None:
            out += self.bias.float()
        return out.to(x.dtype)
