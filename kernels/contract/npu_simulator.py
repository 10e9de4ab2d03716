"""The NPUs to simulate, as text: ``A2``, ``A3:4``, ``A5:2:8GiB`` (generation, devices, memory of each device)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

__all__ = ["Simulator", "SimulatorFaults", "Spec", "SpecError", "active_simulator", "parse"]

_ACTIVATION = "kernels.devices.npu_simulator.activate"

SOC_NAMES = {"A2": "Ascend910B3", "A3": "Ascend910_9391", "A5": "Ascend950PR_9599"}
"""One name of each generation that the wheel knows: get_soc_version() answers 223, 250 and 260."""

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
DEFAULT_DEVICES = 2
DEFAULT_MEMORY = 4 << 30
MAX_DEVICES = 64


class SpecError(ValueError):
    """The text is not a valid description of simulated NPUs."""


@dataclass(frozen=True)
class Spec:
    """``memory``: bytes of each device."""

    generation: str
    devices: int = DEFAULT_DEVICES
    memory: int = DEFAULT_MEMORY

    @property
    def soc_name(self) -> str:
        return SOC_NAMES[self.generation]


def parse(text: str) -> Spec:
    """``soc[:devices[:memory]]``; memory in bytes or with K, M, G, T (KiB and so on). Raises SpecError."""
    example = "write A2, A3 or A5, then devices and memory if wanted, as in A2:2:4GiB"
    generation, *rest = text.strip().split(":")
    if generation.upper() not in SOC_NAMES or len(rest) > 2:
        raise SpecError(f"{text!r} names no simulated NPU: {example}")
    devices, memory = DEFAULT_DEVICES, DEFAULT_MEMORY
    if rest:
        if not rest[0].isdecimal() or not 1 <= int(rest[0]) <= MAX_DEVICES:
            raise SpecError(f"{rest[0]!r} in {text!r} is no number of devices (1 to {MAX_DEVICES}): {example}")
        devices = int(rest[0])
    if len(rest) == 2:
        size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", rest[1].strip(), re.IGNORECASE)
        if size is None:
            raise SpecError(f"{rest[1]!r} in {text!r} is no memory size: {example}")
        memory = int(float(size[1]) * UNITS[size[2].upper()])
        if memory < 64 << 20:
            raise SpecError(f"{rest[1]!r} in {text!r} is too small: a simulated NPU has at least 64 MiB")
    return Spec(generation.upper(), devices, memory)


class SimulatorFaults(Protocol):
    """Errors of a simulated device on demand."""

    def plan_text(self, text: str) -> None:
        """Plan an error: see ``kernels.devices.npu_simulator.faults``."""
        ...


class Simulator(Protocol):
    """The simulated devices of this process."""

    @property
    def faults(self) -> SimulatorFaults: ...


def active_simulator() -> Simulator | None:
    """The simulator of this process; None where it has not been activated."""
    return cast("Simulator | None", import_module(_ACTIVATION).active())
