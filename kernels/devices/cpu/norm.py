"""Root mean square norm on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.devices.cpu.operators import Native

__all__ = ["CpuNorm"]


class CpuNorm:
    """``weight * x / sqrt(mean(x^2) + eps)`` in float32, as ``(sqrt(dim) * weight) * x / hypot(|x|, sqrt(dim * eps))``.

    That is half the operators of torch's own, and a small batch costs what its number of operators does.
    ``weight``: [dim], or [heads, dim] with a weight for each head. ``native``: see CpuDevice.
    """

    def __init__(self, weight: Tensor, eps: float, native: Callable[[torch.dtype, bool], Native | None]) -> None:
        dim = weight.shape[-1]
        self.plain = weight.float().contiguous()
        self.weight = self.plain * math.sqrt(dim)
        self.floor = torch.tensor(math.sqrt(dim * eps))
        self.eps = eps
        self._native = native
        self._fits = Native.fits_norm(weight)

    def __call__(self, x: Tensor) -> Tensor:
        native = self._native(x.dtype, self._fits)
        if native is not None:
            heads = x if self.plain.ndim == x.ndim - 1 else x.reshape(-1, x.shape[-1])  # one weight for all of them
            return native.norm(None, heads, self.plain, self.eps).view(x.shape)
        wide = x.float()
        size = torch.linalg.vector_norm(wide, 2, -1, True).hypot_(self.floor)
        return torch.div(wide, size).mul_(self.weight).to(x.dtype)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        native = self._native(x.dtype, self._fits)
        if native is not None:
            return native.norm(x, residual, self.plain, self.eps), residual
        residual = residual.add_(x)
        return self(residual), residual
