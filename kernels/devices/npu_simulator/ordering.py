"""What the host and the streams have waited for: a missing wait shows, although everything runs when it is issued.

On the device a copy or a replay runs long after its call. Here it has run when the call returns, so a race would go
unnoticed. Therefore the order that events and synchronisations make is kept in vector clocks (Mattern, "Virtual Time
and Global States of Distributed Systems", 1989): every task that matters has a number on its stream, and each stream,
event and the host know up to which number of every stream they have waited. Held against them:

- A copy from pinned memory: the bytes must still be the same when the host has waited for it, and when the next copy
  from the same memory is issued. A buffer that is filled again too early is an error (507000) at that point.
- A copy to pinned memory arrives when the host waits for it, not before: an earlier read finds 0xA5 in every byte.
- A replay: its graph may be updated again only behind it (graphs.py).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.devices.npu_simulator.aten import AtenOperator
from kernels.devices.npu_simulator.cann import Cann
from kernels.devices.npu_simulator.constraints import ConstraintError
from kernels.devices.npu_simulator.dispatch import device_of, raw_stream
from kernels.devices.npu_simulator.memory import is_npu

__all__ = ["CopyOperator", "Order", "operator_class"]

Clock = dict[int, int]
"""By stream: up to which of its tasks."""

UNWRITTEN = 0xA5


def octets(tensor: Tensor) -> Tensor:
    """Its bytes, in its own memory if it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def join(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(number, clock.get(stream, 0))


@dataclass(eq=False)
class Flight:
    """A task that the host has not waited for. ``memory``: pinned memory that it reads (or writes, if ``arrives``), and
    ``octets`` what is in there (or will be).
    """

    stream: int
    number: int
    memory: Tensor | None = None
    octets: Tensor | None = None
    arrives: bool = False

    @property
    def spoilt(self) -> bool:
        """Whether the memory was written to before its copy had run."""
        if self.memory is None or self.octets is None or self.arrives:
            return False
        return not torch.equal(octets(self.memory), self.octets)

    def overlaps(self, other: Tensor) -> bool:
        if self.memory is None:
            return False
        begin, there = self.memory.data_ptr(), other.data_ptr()
        return begin < there + other.nbytes and there < begin + self.memory.nbytes


class Order:
    """The clocks, and what is in flight. ``waits``: how often the host waited for a stream by an operator."""

    def __init__(self, cann: Cann) -> None:
        self.waits = 0
        self._cann = cann
        self._host: Clock = {}
        self._streams: dict[int, Clock] = {}
        self._events: dict[int, Clock] = {}
        self._flights: list[Flight] = []
        self._lock = threading.RLock()

    def issue(self, stream: int, memory: Tensor | None = None, arriving: Tensor | None = None) -> int:
        """A task of the stream begins; its number. ``memory``: pinned, what it reads, or with ``arriving`` writes."""
        with self._lock:
            if memory is not None:
                for flight in self._flights:
                    if flight.overlaps(memory) and (flight.spoilt or flight.arrives or arriving is not None):
                        raise ConstraintError("aten.copy_", "pinned memory", self._rule(flight))
            clock = self._streams.setdefault(stream, {})
            number = clock[stream] = clock.get(stream, 0) + 1
            held = None if memory is None else octets(memory).clone() if arriving is None else arriving
            self._flights.append(Flight(stream, number, memory, held, arriving is not None))
            self._cann.watch(len(self._flights))
            return number

    @staticmethod
    def _rule(flight: Flight) -> str:
        return (
            f"{flight.memory.nbytes if flight.memory is not None else 0} bytes were used again before the host had "
            "waited for their copy: record an event behind it, and wait for the event first"
        )

    def record(self, event: int, stream: int) -> None:
        with self._lock:
            self._events[event] = dict(self._streams.get(stream, {}))

    def forget(self, event: int) -> None:
        with self._lock:
            self._events.pop(event, None)

    def wait(self, event: int, stream: int) -> None:
        """The stream goes on behind the event."""
        with self._lock:
            join(self._streams.setdefault(stream, {}), self._events.get(event, {}))

    def is_behind(self, stream: int, other: int, number: int) -> bool:
        """Whether the stream, or the host, has waited for that task of the other stream."""
        with self._lock:
            return max(self._host.get(other, 0), self._streams.get(stream, {}).get(other, 0)) >= number

    def host_waited(self, stream: int = 0, event: int = 0) -> str:
        """For the stream, for the event, or for everything. What was found wrong, "" for nothing."""
        with self._lock:
            if event:
                join(self._host, self._events.get(event, {}))
            else:
                for clock in [self._streams.get(stream, {})] if stream else list(self._streams.values()):
                    join(self._host, clock)
            wrong = ""
            left = []
            for flight in self._flights:
                if flight.number > self._host.get(flight.stream, 0):
                    left.append(flight)
                elif flight.arrives and flight.memory is not None and flight.octets is not None:
                    octets(flight.memory).copy_(flight.octets)
                elif flight.spoilt:
                    wrong = self._rule(flight)
            self._flights = left
            self._cann.watch(len(left))
            return wrong


def operator_class(name: str) -> type[AtenOperator]:
    """The operators that an aten operator consists of, by its name."""
    if name == "aten::copy_":
        return CopyOperator
    return AskingOperator if name in ASKING else AtenOperator


ASKING = frozenset(
    f"aten::{name}" for name in ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2")
)


class AskingOperator(AtenOperator):
    """One whose answer, or its shape, the host has to wait for."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = super().__call__(*args, **kwargs)
        if not self.attention.value:
            _host_waits(self, raw_stream(device_of(args, kwargs)))
        return result


def _host_waits(operator: AtenOperator, stream: int) -> None:
    order = operator.engine.order
    assert order is not None
    order.waits += 1
    if wrong := order.host_waited(stream):
        raise ConstraintError(operator.name, "pinned memory", wrong)


class CopyOperator(AtenOperator):
    """copy_. Between pinned memory and the device it does not wait if
    ``non_blocking``; other copies between host and device do."""

    def __call__(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
        result = super().__call__(target, source, non_blocking)
        if is_npu(target) == is_npu(source) or self.attention.value:
            return result
        order = self.engine.order
        assert order is not None
        device, host = (target, source) if is_npu(target) else (source, target)
        stream = raw_stream(device.device.index)
        if not non_blocking or not host.is_pinned():
            _host_waits(self, stream)
        elif host is source:
            order.issue(stream, host)
        elif host.is_contiguous():
            arriving = octets(host).clone()
            order.issue(stream, host, arriving)
            octets(host).fill_(UNWRITTEN)
        return result
