"""Kernels compiled for a GPU that is not there: their callers get tensors without memory, and nothing is launched."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import count

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import kernels.devices.cuda.device  # noqa: F401 - loads all that launch

__all__ = ["SHARED", "Compiled", "compiling", "empty", "put"]

SHARED = {80: 163 << 10, 90: 227 << 10}
"""Bytes of shared memory that a block may have, by compute capability (CUDA programming guide, technical
specifications)."""


@dataclass(frozen=True)
class Compiled:
    """``shared``: bytes of a block. ``registers`` of a thread; ``spilled``: bytes that it writes for want of more."""

    kernel: str
    shared: int
    registers: int
    spilled: int
    warps: int


_others = count(1000)  # devices that nothing was compiled for


class _Absent:
    """A driver of a device of some compute capability: enough to compile for it."""

    def __init__(self, capability: int, device: int) -> None:
        self._capability, self._device = capability, device

    def get_current_device(self) -> int:
        return self._device  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


@contextmanager
def compiling(monkeypatch: pytest.MonkeyPatch, capability: int, reported: bool = True) -> Iterator[list[Compiled]]:
    """Within, a kernel that is called is compiled, down to machine code, and listed if ``reported``; once in a process,
    or once within where it is not listed."""
    found: list[Compiled] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> object:
        if not reported:
            return run(self, *args, grid=grid, warmup=True, **options)
        with redirect_stdout(StringIO()) as printed:
            kernel = run(self, *args, grid=grid, warmup=True, **options)
        log = printed.getvalue()
        if log:
            registers, spilled = _reported(log, r"Used (\d+) registers"), _reported(log, r"(\d+) bytes spill stores")
            found.append(Compiled(self.__name__, kernel.metadata.shared, registers, spilled, kernel.metadata.num_warps))
        return kernel

    with monkeypatch.context() as patch:
        patch.setattr(driver, "_active", _Absent(capability, capability if reported else next(_others)))
        patch.setattr(JITFunction, "run", compile_only)
        if reported:
            patch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
        for name, module in list(sys.modules.items()):
            if name.startswith("kernels.devices.cuda."):
                for fact in ("copying", "overlapping", "has_large_shared_memory"):
                    if hasattr(module, fact):
                        patch.setattr(module, fact, lambda device: capability >= 90)
        yield found


def _reported(log: str, pattern: str) -> int:
    number = re.search(pattern, log)
    assert number is not None, log
    return int(number[1])


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def put(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.copy()).to("meta")
