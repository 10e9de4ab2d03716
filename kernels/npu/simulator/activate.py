"""Turn this process into one that has NPUs: load the simulated CANN, then the real torch and torch_npu over it.

What is real: the torch_npu wheel, its dispatcher, caching allocator, streams, events, Python API and memory statistics.
What is simulated: the runtime below it (runtime.c), the kernels (CPU operators and references), graphs, collectives.
What is not: time. Nothing here says how fast anything is on a device.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from kernels.npu.simulator.build import cann_libraries
from kernels.npu.simulator.cann import Cann
from kernels.npu.simulator.spec import Spec, parse

if TYPE_CHECKING:
    from kernels.npu.simulator.dispatch import Engine
    from kernels.npu.simulator.faults import Faults
    from kernels.npu.simulator.graphs import Graphs

__all__ = ["ActivationError", "Simulator", "activate", "active"]


class ActivationError(RuntimeError):
    """The simulator could not be put under this process."""


class Simulator:
    """The simulated machine of this process; there is one at most, because torch_npu is loaded once.

    ``simulated``: the npu:: operators that have a reference. ``aten``: how many aten operators run as the CPU's.
    """

    def __init__(self, spec: Spec, cann: Cann, engine: Engine, libraries: list[Any]) -> None:
        self.spec, self.cann, self.engine = spec, cann, engine
        self.simulated: list[str] = []
        self.aten = 0
        self._libraries = libraries  # a kernel lives as long as the library that registered it

    @property
    def faults(self) -> Faults:
        """Errors on demand."""
        assert self.engine.faults is not None
        return self.engine.faults

    @property
    def graphs(self) -> Graphs:
        """Captured graphs."""
        assert self.engine.graphs is not None
        return self.engine.graphs

    @property
    def waits(self) -> int:
        """How often the host has waited for a device: synchronisations, and copies that are not asynchronous."""
        assert self.engine.order is not None
        return self.cann.waits() + self.engine.order.waits

    def describe(self) -> str:
        """``simulated A2``"""
        return f"simulated {self.spec.generation}"


_active: list[Simulator] = []


def active() -> Simulator | None:
    """The simulator of this process."""
    return _active[0] if _active else None


def activate(text: str) -> Simulator:
    """Simulate the NPUs that ``text`` names (see spec.parse) in this process, before its first import of torch.

    Sets TORCH_DEVICE_BACKEND_AUTOLOAD=0 (torch_npu is imported here, after the libraries) and TASK_QUEUE_ENABLE=0 (the
    wheel's launch thread has nothing to overlap) in this process's environment; a worker process, never the server's.
    ASCEND_RT_VISIBLE_DEVICES hides devices as on a real machine. Raises SpecError, BuildError, ActivationError.
    """
    spec = parse(text)
    if _active:
        if _active[0].spec != spec:
            raise ActivationError(f"this process already simulates {_active[0].spec}; start another for {spec}")
        return _active[0]
    if "torch" in sys.modules:
        raise ActivationError("torch is already imported: activate the NPU simulator before the first import of torch")
    devices = visible(spec, os.environ.get("ASCEND_RT_VISIBLE_DEVICES"))
    folder = cann_libraries()
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    os.environ["TASK_QUEUE_ENABLE"] = "0"
    cann = Cann(folder, spec, devices)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*ASCEND_HOME_PATH.*")
        import torch
        import torch_npu  # noqa: F401 - registers the device

    from kernels.npu.simulator.aten import take_over_aten
    from kernels.npu.simulator.collectives import take_over_hccl
    from kernels.npu.simulator.dispatch import Engine
    from kernels.npu.simulator.faults import Faults
    from kernels.npu.simulator.graphs import Graphs
    from kernels.npu.simulator.ordering import Order
    from kernels.npu.simulator.takeover import take_over_npu

    engine = Engine(cann)
    engine.order = Order(cann)
    engine.graphs, engine.faults = Graphs(engine), Faults(cann)
    aten, npu = torch.library.Library("aten", "IMPL"), torch.library.Library("npu", "IMPL")
    simulator = Simulator(spec, cann, engine, [aten, npu])
    simulator.simulated = take_over_npu(engine, npu)
    simulator.aten = take_over_aten(engine, aten)
    take_over_hccl(engine)
    if planned := os.environ.get("TROUPE_NPU_FAULT"):
        simulator.faults.plan_text(planned)
    _active.append(simulator)
    return simulator


def visible(spec: Spec, listed: str | None) -> int:
    """Devices that this process sees: all, or as many as ASCEND_RT_VISIBLE_DEVICES lists."""
    if listed is None or not listed.strip():
        return spec.devices
    numbers = [part.strip() for part in listed.split(",")]
    for number in numbers:
        if not number.isdecimal() or int(number) >= spec.devices:
            raise ActivationError(
                f"ASCEND_RT_VISIBLE_DEVICES={listed}: {number!r} is none of the {spec.devices} simulated devices "
                f"(0 to {spec.devices - 1}); simulate more with {spec.generation}:{spec.devices + 1}"
            )
    return len(numbers)
