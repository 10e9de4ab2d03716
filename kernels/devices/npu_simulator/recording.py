"""What a capture keeps: calls on fixed memory, waits and writes of words, task groups, and the graph they make."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels.devices.npu_simulator.checking import to_meta
from kernels.devices.npu_simulator.dispatch import META, Call, Operator, flat
from kernels.devices.npu_simulator.memory import Aliases, is_npu, new_like

__all__ = [
    *("Capture", "CaptureError", "Graph", "Group", "Run", "Shapes", "Task", "Value", "ValueTask", "Word"),
    "check_capturable",
]

UNSUPPORTED = 107030


class CaptureError(RuntimeError):
    """The operator cannot be part of a graph."""


@dataclass(eq=False)
class Task:
    """A kept call and where its results go. ``results``: (index among the flat results, alias of the NPU tensor)."""

    operator: Operator
    call: Call
    results: list[tuple[int, Tensor]] = field(default_factory=list)

    def run(self) -> None:
        produced = list(flat(self.operator.compute(*self.call.args, **self.call.kwargs)))
        for index, place in self.results:
            place.copy_(produced[index])

    def ranges(self) -> set[tuple[int, int]]:
        """Device memory that it touches."""
        tensors = [alias for _, alias in self.call.tensors] + [place for _, place in self.results]
        return {(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors if t.numel()}


class Word(ctypes.Structure):
    """A word of device memory and what to write there or to wait for (struct word in runtime.c)."""

    _fields_ = (("address", ctypes.c_uint64), ("value", ctypes.c_uint64), ("mode", ctypes.c_uint64))


Value = ctypes.c_uint64


@dataclass(eq=False)
class ValueTask:
    """``kind``: write or wait. torch_npu makes external events of these. ``mode``: 0 at least, 1 equal, 2 any bit."""

    kind: str
    address: int
    value: int
    mode: int

    def holds(self) -> bool:
        """Whether the wait is over."""
        result = int(Value.from_address(self.address).value)
        return (
            result >= self.value
            if self.mode == 0
            else result == self.value
            if self.mode == 1
            else bool(result & self.value)
        )


class Shapes:
    """A call's arguments as meta tensors, and what comes back of its shape function as new NPU tensors."""

    def __init__(self, aliases: Aliases, task: Task) -> None:
        self._aliases, self._task = aliases, task
        self._metas: dict[int, Tensor] = {}
        self._count = itertools.count()
        self.views = 0
        """Results that are views of arguments."""

    def meta(self, value: Any) -> Any:
        """``value`` without memory; the same tensor becomes the same meta tensor."""
        if isinstance(value, Tensor):
            if id(value) not in self._metas:
                self._metas[id(value)] = to_meta(value)
            return self._metas[id(value)]
        if isinstance(value, dict):
            return {name: self.meta(item) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.meta(item) for item in value)
        return META if isinstance(value, torch.device) else value

    def result(self, value: Any) -> Any:
        """Allocated results, entered into the task; arguments and views of them as what they are."""
        if isinstance(value, (list, tuple)):
            return type(value)(self.result(item) for item in value)
        number = next(self._count)
        if not isinstance(value, Tensor):
            return value
        for tensor, alias in self._task.call.tensors:
            given = self._metas.get(id(alias))
            if value is given:
                return tensor
            if given is not None and value.untyped_storage()._cdata == given.untyped_storage()._cdata:
                self.views += 1  # inference mode has no ``_base``
                offset = tensor.storage_offset() + value.storage_offset()
                return tensor.as_strided(value.size(), value.stride(), offset)
        made = new_like(value, self._task.call.target())
        self._task.results.append((number, self._aliases.of(made)))
        return made


@dataclass(eq=False)
class Group:
    """A task group: the calls that an update may replace."""

    number: int
    tasks: list[Task] = field(default_factory=list)
    graph: Graph | None = None


@dataclass(eq=False)
class Capture:
    """A graph while it is captured. ``automatic``: with torch_npu's mode on that makes task groups of attention."""

    number: int
    stream: int
    device: int
    thread: int
    automatic: bool = False
    streams: dict[int, bool] = field(default_factory=dict)  # side stream -> whether it has work not yet joined
    events: dict[int, int] = field(default_factory=dict)  # event recorded inside -> stream
    tasks: list[Task | ValueTask] = field(default_factory=list)
    group: Group | None = None
    groups: list[Group] = field(default_factory=list)
    broken: str = ""


@dataclass(eq=False)
class Graph:
    """A captured graph. ``taken``: streams it holds on to. ``replays``: stream and number there of the latest ones."""

    number: int
    device: int
    tasks: list[Task | ValueTask]
    taken: int
    replays: list[tuple[int, int]] = field(default_factory=list)


@dataclass(eq=False)
class Run:
    """A replay under way."""

    graph: Graph
    position: int = 0


def check_capturable(operator: Operator, args: Any, kwargs: Any) -> None:
    """Raise CaptureError for what reads back to the host or copies pageable memory."""
    name = operator.overload._schema.name
    if name in ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::_assert_async"):
        raise CaptureError(
            f"error code is {UNSUPPORTED}: {operator.name} reads a value back to the host during a capture"
        )
    for value in flat((args, kwargs)):
        if isinstance(value, Tensor) and not is_npu(value) and value.dim() and not value.is_pinned():
            raise CaptureError(
                f"error code is {UNSUPPORTED}: {operator.name} copies to or from pageable host memory during a "
                "capture: make the tensor on the NPU before, or pin it"
            )
    if name == "aten::copy_" and not is_npu(args[0]):
        raise CaptureError(
            f"error code is {UNSUPPORTED}: {operator.name} copies to the host during a capture: "
            "read the result after the replay"
        )
