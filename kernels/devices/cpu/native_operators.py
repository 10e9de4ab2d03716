"""The native operators of one device, from the moment at which they are compiled."""

from __future__ import annotations

import logging
import subprocess
import weakref
from typing import Protocol

import torch

from kernels.contract.cpu_isa import CpuIsa
from kernels.devices.cpu.native.library import OPERATORS, SHIPPED, PendingBuild, built, open_library, start_build
from kernels.devices.cpu.operators import Native
from kernels.devices.cpu.recording import NotNative

__all__ = ["NativeOperators"]

_log = logging.getLogger("troupe.kernels")


class _Adopts(Protocol):
    def adopt(self, native: Native) -> None: ...


class NativeOperators:
    """``current``: the operators; None while there are none. ``isa``: the instruction set that they may use.
    ``threads``: of each operator. ``batch_invariant``: whether a row's result must depend on no other.
    """

    def __init__(self, isa: CpuIsa, threads: int, batch_invariant: bool = False) -> None:
        self.isa = isa
        self.threads = threads
        self.batch_invariant = batch_invariant
        self.current: Native | None = None
        self.building: subprocess.Popen[bytes] | PendingBuild | None = None
        self._adopting: weakref.WeakSet[_Adopts] = weakref.WeakSet()

    @property
    def origin(self) -> str:
        """Where the operators come from: see ``Device.operators``."""
        if self.current is None:
            return "none" if self.building is None else "pending"
        return "wheel" if self.current.library.path.parent == SHIPPED else "compiled"

    @property
    def recording(self) -> bool:
        """Whether operators are recorded into a program rather than run."""
        return self.current is not None and self.current.recording

    def open(self) -> None:
        """Load the operators, or start to compile them for later."""
        source = OPERATORS.get(self.isa)
        if self.current is not None or source is None:
            return
        library = open_library(source)
        if library is not None:
            self.current = Native(library, self.threads, self.batch_invariant)
        elif built(source) is None:
            self.building = start_build(source)
            if self.building is not None:
                _log.info(
                    "The native operators are compiled in the background, once on this machine, which takes a minute "
                    "or more; steps are slower until then"
                )

    def renew(self) -> bool:
        """Load the operators if they were compiled meanwhile, and let registered layers use them. -> whether."""
        if self.building is None or self.building.poll() is None:
            return False
        self.building = None
        library = open_library(OPERATORS[self.isa])
        if library is None:
            return False
        self.current = Native(library, self.threads, self.batch_invariant)
        for layer in self._adopting:
            layer.adopt(self.current)
        _log.info("The compiled native operators are in use now.")
        return True

    def wait(self) -> Native | None:
        """The operators, once they are compiled: without them a weight would have to be kept as floats as well, or
        bf16 is slow.
        """
        if self.current is None and self.building is not None:
            _log.info("The native operators are compiled, once on this machine, before the model is loaded.")
            self.building.wait()
            self.renew()
        return self.current

    def register(self, layer: _Adopts) -> None:
        """``layer`` adopts the operators once they are there."""
        self._adopting.add(layer)

    def fitting(self, dtype: torch.dtype, fits: bool) -> Native | None:
        """The operators, if they are there and fit. Raises NotNative if a program needs them."""
        native = self.current
        if native is None or (fits and dtype == torch.bfloat16):
            return native
        if native.recording:
            raise NotNative("an operator's shape")
        return None

    def refuse(self, operator: str) -> None:
        """Raises NotNative while operators are recorded. ``operator``: the one that is not native, for the log."""
        if self.recording:
            raise NotNative(operator)
