"""Runs operators that the dispatcher sends to the NPU on the simulated one.

    now        run it on CPU aliases of the same memory, copy new results to new NPU tensors
    capturing  run only the shape function, allocate the results, keep the call for the replay
    updating   do not run it: put its arguments in the place of a captured call's

Nothing runs concurrently: an operator has finished when its call returns. Missing synchronizations of the host are
detected for copies of pinned memory and for updates of graphs (ordering.py), but not between operators of two streams.
Speed says nothing about the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch_npu
from torch import Tensor

from kernels.devices.npu_simulator.cann import Cann
from kernels.devices.npu_simulator.constraints import ConstraintError
from kernels.devices.npu_simulator.memory import Aliases, is_npu
from kernels.devices.npu_simulator.randomness import host_generator

if TYPE_CHECKING:
    from kernels.devices.npu_simulator.faults import Faults
    from kernels.devices.npu_simulator.graphs import Graphs
    from kernels.devices.npu_simulator.ordering import Order

__all__ = ["FLOATS_8", "Call", "Engine", "Operator", "flat", "raw_stream"]

CPU = torch.device("cpu")
META = torch.device("meta")
PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype, torch.layout, torch.memory_format))
FLOATS_8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu})
"""8-bit floating-point dtypes."""


def flat(value: Any) -> Iterator[Any]:
    """The leaves of nested lists, tuples and dictionaries."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from flat(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from flat(item)
    else:
        yield value


def device_of(args: Any, kwargs: Any) -> int:
    """The NPU of a call: that of its first tensor, of its device argument, or the current one."""
    places = [value.device if is_npu(value) else value for value in flat((args, kwargs))]
    named = [place for place in places if isinstance(place, torch.device) and place.type == "npu"]
    index = named[0].index if named else None
    return torch.npu.current_device() if index is None else index


def raw_stream(device: int) -> int:
    """The address of the current stream of the device, as the runtime knows it."""
    with torch.npu.device(device):  # its streams are created when it first becomes the current device
        return int(torch_npu._C._npu_getCurrentRawStream(device))


class Call:
    """The arguments of one call in a form that can run again: CPU aliases of NPU memory, and copies of host values."""

    def __init__(self, aliases: Aliases, args: Any, kwargs: Any) -> None:
        self.aliases = aliases
        self.device: torch.device | None = None
        self.tensors: list[tuple[Tensor, Tensor]] = []  # (NPU tensor, its alias)
        self.others: list[Tensor] = []
        self.dtypes: set[torch.dtype] = set()  # of the tensors
        self.args = self._host(args)
        self.kwargs = {name: self._host(value) for name, value in kwargs.items()}
        if self.kwargs.get("pin_memory"):
            self.kwargs["pin_memory"] = False

    def _host(self, value: Any) -> Any:
        if type(value) in PLAIN:
            return value
        if isinstance(value, Tensor):
            device = value.device
            if device.type != "npu":
                self.others.append(value)
                return value
            alias = self.aliases.of(value)
            self.tensors.append((value, alias))
            self.dtypes.add(value.dtype)
            if self.device is None:
                self.device = device
            return alias
        if isinstance(value, (list, tuple)):
            return type(value)([self._host(item) for item in value])
        if isinstance(value, torch.device):
            if value.type == "npu":
                self.device = value
                return CPU
            return value
        if isinstance(value, torch.Generator):
            return host_generator(value)
        return value

    def release(self) -> None:
        """Drop references to the NPU tensors: a graph stores addresses and keeps nothing alive."""
        self.tensors = [(alias, alias) for _, alias in self.tensors]

    def target(self) -> torch.device:
        """The device of new results."""
        if self.device is None or self.device.index is None:
            self.device = torch.device("npu", torch.npu.current_device())
        return self.device

    def original(self, result: Tensor) -> Tensor | None:
        """The NPU tensor that ``result`` is, or is a view of; None for a new one."""
        for tensor, alias in self.tensors:
            if result is alias:
                return tensor
        address = result.untyped_storage().data_ptr() if result.is_cpu else 0
        if address:
            for tensor, alias in self.tensors:
                if alias.untyped_storage().data_ptr() == address:
                    base = tensor if tensor.dtype == result.dtype else tensor.view(result.dtype)
                    return base.as_strided(result.size(), result.stride(), result.storage_offset())
        return None

    def device_result(self, result: Any) -> Any:
        """``result`` of the CPU operator as NPU tensors."""
        if isinstance(result, Tensor):
            if not result.is_cpu:
                return result
            value = self.original(result)
            if value is not None:
                return value
            if any(result is other for other in self.others):
                return result  # a CPU tensor that was written to
            return self.aliases.copy_of(result, self.target())
        if isinstance(result, (list, tuple)):
            return type(result)(self.device_result(item) for item in result)
        return result


class Engine:
    """The state that all operators share."""

    def __init__(self, cann: Cann) -> None:
        self.cann = cann
        self.aliases = Aliases()
        self.graphs: Graphs | None = None
        self.faults: Faults | None = None
        self.order: Order | None = None
        self.calls: dict[str, int] = {}

    def interrupted(self, operator: Operator, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """Called while a capture, update or fault is active. Returns (True, result) if the call must not run now."""
        device = device_of(args, kwargs)
        if self.faults is not None:
            self.faults.before(operator.name, device)
        if self.cann.error(device):
            with torch.npu.device(device):
                torch.npu.synchronize()
            raise RuntimeError(f"simulated NPU {device} is in error {self.cann.error(device)}")
        if self.graphs is None:
            return False, None
        return self.graphs.intercept(operator, device, args, kwargs)


class Operator:
    """A replaced overload.

    ``compute``: the operator on CPU tensors. ``shape``: the same on meta tensors; None if it returns no new tensors.
    ``host``: whether it only queries host state and is never part of a graph. ``updatable``: whether torch_npu can
    update its captured call, if it is in a task group.
    """

    updatable = False

    def __init__(
        self,
        engine: Engine,
        overload: Any,
        compute: Callable[..., Any],
        shape: Callable[..., Any] | None,
        host: bool = False,
    ) -> None:
        self.engine, self.overload, self.compute, self.shape, self.host = engine, overload, compute, shape, host
        self.name = str(overload)
        self.attention = engine.cann.attention

    def allow(self, call: Call) -> None:
        """Raise for unsupported dtypes: there are no 8-bit floats before A5."""
        if not call.dtypes.isdisjoint(FLOATS_8) and self.engine.cann.spec.generation != "A5":
            raise ConstraintError(self.name, "dtype", "only A5 computes with 8-bit floats")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calls = self.engine.calls
        calls[self.name] = calls.get(self.name, 0) + 1
        if self.attention.value and not self.host:
            done, result = self.engine.interrupted(self, args, kwargs)
            if done:
                return result
        call = Call(self.engine.aliases, args, kwargs)
        self.allow(call)
        return call.device_result(self.compute(*call.args, **call.kwargs))
