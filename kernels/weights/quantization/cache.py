"""Quantization of cached keys and values to 8 bits, and its inverse.

Scales are dynamic or static. A dynamic scale belongs to one token and key head; it is computed when the token is
written and stored beside its page. It needs no calibration and never clips. Static scales belong to a layer and come
from a checkpoint or a file (``kernels.state.cache_dtype``). They save the two bytes of a dynamic scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "CACHE_DTYPES",
    "NONE",
    "SCALE",
    "LayerScales",
    "max_value",
    "narrow",
    "round_fixed",
    "round_tokens",
    "widen",
]

CACHE_DTYPES = {
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""Dtypes by the names of --kv-cache-dtype."""

SCALE = torch.bfloat16
"""Default dtype of a token's scale. The scale is rounded before it is used, so that its few bits cost no precision."""

NONE = -128
"""The int8 value that marks a number that is not finite, with static scales. No finite number is rounded to it."""

_TINY = torch.finfo(torch.bfloat16).tiny


def max_value(dtype: torch.dtype) -> float:
    """The largest number that is used."""
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max


def narrow(dtype: torch.dtype) -> bool:
    """Whether numbers of the type need scales."""
    return dtype.itemsize == 1


@dataclass(frozen=True)
class LayerScales:
    """Static scales of one layer: ``x = (q - offsets) * scales``, both f32 [2, kv_heads, dim], for keys and then for
    values. ``offsets``: integers; None: all are 0."""

    scales: Tensor
    offsets: Tensor | None = None

    def part(self, begin: int, end: int) -> LayerScales:
        """The scales of key heads ``begin .. end``."""
        offsets = None if self.offsets is None else self.offsets[:, begin:end].contiguous()
        return LayerScales(self.scales[:, begin:end].contiguous(), offsets)

    def to(self, device: torch.device) -> LayerScales:
        return LayerScales(self.scales.to(device), None if self.offsets is None else self.offsets.to(device))


def round_tokens(x: Tensor, dtype: torch.dtype, scale_dtype: torch.dtype = SCALE) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` [..., dim] with dynamic scales -> values in ``dtype``, and scales [...], one for each vector of
    ``dim`` numbers. A vector that is not finite gets a scale that is not finite, and so it is read back."""
    wide, largest = x.float(), max_value(dtype)
    scales = (wide.abs().amax(-1) / largest).clamp_(min=_TINY).to(scale_dtype)
    return _rounded(wide / scales.float().unsqueeze(-1), dtype), scales


def round_fixed(x: Tensor, fixed: LayerScales, dtype: torch.dtype, marked: bool = False) -> Tensor:
    """Quantize ``x`` [..., 2, kv_heads, dim] with static scales -> values in ``dtype``. Numbers that are too large are
    clamped. ``marked``: numbers that are not finite become NaN, or ``NONE`` in int8; else a NaN becomes 0 in int8, and
    infinity is clamped."""
    wide = x.float() / fixed.scales
    result = _rounded(wide if fixed.offsets is None else wide + fixed.offsets, dtype)
    if not marked:
        return result
    none = torch.tensor(NONE if dtype == torch.int8 else torch.nan).to(dtype).view(torch.int8)
    return torch.where(x.isfinite(), result.view(torch.int8), none).view(dtype)


def _rounded(wide: Tensor, dtype: torch.dtype) -> Tensor:
    largest = max_value(dtype)
    if dtype != torch.int8:
        return wide.clamp_(-largest, largest).to(dtype)
    return wide.round_().clamp_(-largest, largest).nan_to_num_(0.0).to(dtype)


def widen(values: Tensor, scales: Tensor | None, fixed: LayerScales | None, dtype: torch.dtype) -> Tensor:
    """Dequantize ``values`` [..., 2, kv_heads, dim]. Dynamic ``scales`` [..., 2, kv_heads], or static ones, ``fixed``,
    or neither for 16-bit floats."""
    if scales is None and fixed is None:
        return values.to(dtype)
    wide = values.float()
    if scales is not None:
        return wide.mul_(scales.float().unsqueeze(-1)).to(dtype)
    assert fixed is not None
    if values.dtype == torch.int8:
        wide.masked_fill_(values == NONE, torch.nan)
    if fixed.offsets is not None:
        wide -= fixed.offsets
    return wide.mul_(fixed.scales).to(dtype)
