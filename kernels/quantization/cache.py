"""Keys and values in fewer bits than the model computes in: how they are rounded, and what that gives back.

A cache of 8 bits has a scale for each token and key head, found as the token is written and kept beside its page; or
scales for a layer that were found before, of a checkpoint or of a file (``kernels.quantization.cache_scales``). With
the first nothing is ever cut off, whatever the model's keys are like, and there is nothing to calibrate; the second
save its two bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["CACHE_DTYPES", "NONE", "SCALE", "LayerScales", "most", "narrow", "round_fixed", "round_tokens", "widen"]

CACHE_DTYPES = {
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""By the names of --kv-cache-dtype."""

SCALE = torch.bfloat16
"""Of a token's scale where a platform has no need of another: it is rounded before it is used, so that its few bits
cost no precision."""

NONE = -128
"""What no number is rounded to in int8: one that is not finite, where no scale can say so."""

_TINY = torch.finfo(torch.bfloat16).tiny


def most(dtype: torch.dtype) -> float:
    """The largest number that is used."""
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max


def narrow(dtype: torch.dtype) -> bool:
    """Whether numbers of the type need scales."""
    return dtype.itemsize == 1


@dataclass(frozen=True)
class LayerScales:
    """Of one layer, found before: ``x = (q - offsets) * scales``, each f32 [2, kv_heads, dim], keys' then values'.
    ``offsets`` are None where they are 0, and whole numbers."""

    scales: Tensor
    offsets: Tensor | None = None

    def part(self, begin: int, end: int) -> LayerScales:
        """Of key heads ``begin .. end``."""
        offsets = None if self.offsets is None else self.offsets[:, begin:end].contiguous()
        return LayerScales(self.scales[:, begin:end].contiguous(), offsets)

    def to(self, device: torch.device) -> LayerScales:
        return LayerScales(self.scales.to(device), None if self.offsets is None else self.offsets.to(device))


def round_tokens(x: Tensor, dtype: torch.dtype, scale_dtype: torch.dtype = SCALE) -> tuple[Tensor, Tensor]:
    """``x`` [..., dim] -> the same in ``dtype``, and a scale [...] for each of its last dimensions: not finite where
    something in one is not, so that it stays so in what is read back."""
    wide, largest = x.float(), most(dtype)
    scales = (wide.abs().amax(-1) / largest).clamp_(min=_TINY).to(scale_dtype)
    return _rounded(wide / scales.float().unsqueeze(-1), dtype), scales


def round_fixed(x: Tensor, fixed: LayerScales, dtype: torch.dtype, marked: bool = False) -> Tensor:
    """``x`` [..., 2, kv_heads, dim] -> the same in ``dtype``; what is too large becomes the largest. ``marked``: what
    is not finite becomes NaN, or ``NONE`` among whole numbers; else int8 has 0 for a NaN, and infinity is too large."""
    wide = x.float() / fixed.scales
    found = _rounded(wide if fixed.offsets is None else wide + fixed.offsets, dtype)
    if not marked:
        return found
    none = torch.tensor(NONE if dtype == torch.int8 else torch.nan).to(dtype).view(torch.int8)
    return torch.where(x.isfinite(), found.view(torch.int8), none).view(dtype)


def _rounded(wide: Tensor, dtype: torch.dtype) -> Tensor:
    largest = most(dtype)
    if dtype != torch.int8:
        return wide.clamp_(-largest, largest).to(dtype)
    return wide.round_().clamp_(-largest, largest).nan_to_num_(0.0).to(dtype)


def widen(values: Tensor, scales: Tensor | None, fixed: LayerScales | None, dtype: torch.dtype) -> Tensor:
    """What ``values`` [..., 2, kv_heads, dim] stand for. ``scales`` [..., 2, kv_heads], or ``fixed``, or neither where
    they are floats of 16 bits."""
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
