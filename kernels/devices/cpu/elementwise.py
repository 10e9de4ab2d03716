"""Elementwise operators on the CPU: native ones for bf16, else plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.core.operators import Linear, Norm
from kernels.devices.cpu.native_operators import NativeOperators
from kernels.devices.cpu.norm import CpuNorm
from kernels.devices.cpu.operators import Native
from kernels.devices.elementwise import Elementwise

__all__ = ["CpuElementwise"]


class CpuElementwise(Elementwise):
    norms_views = True

    def __init__(self, native: NativeOperators) -> None:
        super().__init__(torch.device("cpu"))
        self._native = native
        self._fitting = native.fitting

    def make_norm(self, weight: Tensor, eps: float) -> Norm:
        return CpuNorm(weight, eps, self._fitting)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        native = self._fitting(x.dtype, Native.fits_silu(x))
        return super().silu_and_mul(x) if native is None else native.silu_and_mul(x)

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        native = self._native.current
        if native is not None and native.recording:
            return native.embed(table, len(ids))
        return super().embed(ids, table)

    def compose(self, first: Linear, then: Linear) -> Linear:
        def run(x: Tensor) -> Tensor:
            self._native.refuse("an operator of torch")
            return then(first(x))

        return run

    def empty_rows(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        native = self._fitting(dtype, True)
        return super().empty_rows(rows, width, dtype) if native is None else native.empty_rows(rows, width)

    def add_rows(self, x: Tensor, y: Tensor | None, out: Tensor) -> None:
        native = self._fitting(x.dtype, Native.fits_add(x.shape[1]))
        if native is not None:
            return native.add(x, y, out)
        super().add_rows(x, y, out)

    def add_bias(self, x: Tensor, bias: Tensor) -> Tensor:
        self._native.refuse("a norm's bias")
        return super().add_bias(x, bias)

    def add_weighted(self, x: Tensor, y: Tensor, logits: Tensor) -> Tensor:
        native = self._fitting(x.dtype, Native.fits_add(x.shape[1]))
        if native is None:
            return super().add_weighted(x, y, logits)
        native.add(x, y, x, logits)
        return x
