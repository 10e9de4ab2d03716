"""Simulates NPUs in this process: loads the simulated CANN, then the real torch and torch_npu on top of it.

Real: the torch_npu wheel, its dispatcher, caching allocator, streams, events, Python API and memory statistics.
Simulated: the runtime below it (runtime.c), kernels (CPU operators and reference implementations), graphs and
collectives. Not simulated: time. Times measured here say nothing about a device.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from kernels.contract.npu_simulator import Spec, parse
from kernels.devices.npu_simulator.build import cann_libraries
from kernels.devices.npu_simulator.cann import Cann

if TYPE_CHECKING:
    from kernels.devices.npu_simulator.dispatch import Engine
    from kernels.devices.npu_simulator.faults import Faults
    from kernels.devices.npu_simulator.graphs import Graphs

__all__ = ["ActivationError", "Simulator", "activate", "active"]


class ActivationError(RuntimeError):
    """The simulator could not be activated in this process."""


class Simulator:
    """The simulated machine of this process; at most one, because torch_npu is loaded once.

    ``simulated``: the npu:: operators with a reference implementation. ``aten``: number of aten operators that run on
    the CPU.
    """

    def __init__(self, spec: Spec, cann: Cann, engine: Engine, libraries: list[Any]) -> None:
        self.spec, self.cann, self.engine = spec, cann, engine
        self.simulated: list[str] = []
        self.aten = 0
        self._libraries = libraries  # kernels live as long as the library that registered them

    @property
    def faults(self) -> Faults:
        """Fault injection."""
        assert self.engine.faults is not None
        return self.engine.faults

    @property
    def graphs(self) -> Graphs:
        """Captured graphs."""
        assert self.engine.graphs is not None
        return self.engine.graphs

    @property
    def waits(self) -> int:
        """Number of synchronizations of the host with a device, including synchronous copies."""
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

    from kernels.devices.npu_simulator.aten import take_over_aten
    from kernels.devices.npu_simulator.collectives import take_over_hccl
    from kernels.devices.npu_simulator.dispatch import Engine
    from kernels.devices.npu_simulator.faults import Faults
    from kernels.devices.npu_simulator.graphs import Graphs
    from kernels.devices.npu_simulator.ordering import Order
    from kernels.devices.npu_simulator.takeover import take_over_npu, take_over_triton

    engine = Engine(cann)
    engine.order = Order(cann)
    engine.graphs, engine.faults = Graphs(engine), Faults(cann)
    aten, npu = torch.library.Library("aten", "IMPL"), torch.library.Library("npu", "IMPL")
    simulator = Simulator(spec, cann, engine, [aten, npu])
    simulator.simulated = take_over_npu(engine, npu)
    simulator.aten = take_over_aten(engine, aten)
    take_over_triton(engine)
    take_over_hccl(engine)
    if planned := os.environ.get("TROUPE_NPU_FAULT"):
        simulator.faults.plan_text(planned)
    _active.append(simulator)
    return simulator


def visible(spec: Spec, listed: str | None) -> int:
    """Number of visible devices: all, or those that ASCEND_RT_VISIBLE_DEVICES lists."""
    if listed is None or not listed.strip():
        return spec.devices
    numbers = [part.strip() for part in listed.split(",")]
    for number in numbers:
        if not number.isdecimal() or int(number) >= spec.devices:
            raise ActivationError(
                f"ASCEND_RT_VISIBLE_DEVICES={listed}: {number!r} is not one of the {spec.devices} simulated devices "
                f"(0 to {spec.devices - 1}); simulate more with {spec.generation}:{spec.devices + 1}"
            )
    return len(numbers)
