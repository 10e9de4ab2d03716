"""Graph capture and replay: recorded calls run again, on the same memory, with the host values of the
capture.

A capture runs nothing: results are allocated by each operator's shape function, and the call is recorded. A replay runs
the recorded calls in order. Host values are part of a call; only the calls of a task group can be replaced, by update
calls of the same operator. An external event makes a replay wait until it is recorded: the rest of the graph then runs
in the thread that records it. The error codes are those of the runtime:

    107024, 107025  a side stream that nothing ties to the capture, or that was not joined at its end
    107030          what cannot be captured: a synchronisation, a copy to or from pageable memory, a host's question
    107033          task groups not in pairs          107038  begin and end of a capture in different threads
    107040          an update that is not the captured operator's          207008  no stream left for the graph
    507046          a wait for a replay whose external event is not recorded (after ``patience`` seconds)

Not simulated: collisions of memory between graphs of one pool that run at once (nothing runs at once), conditional
nodes, and the difference between the capture error modes (the strictest is used, for the capturing thread).
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import threading
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch_npu.npu.graphs import _GraphDispatchMode

from kernels.devices.npu_simulator.checking import to_meta
from kernels.devices.npu_simulator.constraints import ConstraintError
from kernels.devices.npu_simulator.dispatch import Call, Engine, Operator, raw_stream
from kernels.devices.npu_simulator.recording import (
    Capture,
    CaptureError,
    Graph,
    Group,
    Shapes,
    Task,
    ValueTask,
    Word,
    check_capturable,
)
from kernels.devices.npu_simulator.replay import Replays

__all__ = ["CaptureError", "Graphs"]

_log = logging.getLogger("troupe.kernels.npu.simulator")

OK = 0
DEPENDENCY, UNJOINED, CAPTURED, UNSUPPORTED, GROUP_STATUS, WRONG_THREAD, UPDATE_FAILED = (
    *(107024, 107025, 107027, 107030, 107033, 107038, 107040),
)
NO_STREAM, INVALIDATED = 207008, 507903
PARAM_INVALID, NOT_CAPTURED, INTERNAL = 107000, 107029, 507000


class Graphs:
    """All captures and graphs of the process."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.cann = engine, engine.cann
        self.graphs: dict[int, Graph] = {}
        self._numbers = itertools.count(0x1000)
        self._captures: dict[int, Capture] = {}  # by every stream of the capture
        self._groups: dict[int, Group] = {}
        self._updates: dict[int, tuple[Group, int]] = {}  # by stream: (group, number of update calls so far)
        self._lock = threading.RLock()
        self.replays = Replays(engine, self._lock, self._refuse)
        assert engine.order is not None
        self.order = engine.order
        self._doors = dict(
            enumerate(
                (
                    *(self._capture_begin, self._capture_end, self._capture_info, self._execute, self._destroy),
                    *(self._group_begin, self._group_end, self._update_begin, self._update_end),
                    *(self._event_record, self._event_wait, self._synchronize, self._transfer, self._query),
                    *(self._synchronize_event, self._event_destroy, self._value_write, self._value_wait),
                ),
                start=1,
            )
        )  # in the order of enum host_call in runtime.c
        self.cann.host_call = self._open

    def _open(self, what: int, first: int, second: int, out: Any) -> int:
        try:
            with self._lock:
                return self._doors[what](first, second, out)
        except Exception as error:  # an exception cannot cross C
            _log.exception("the NPU simulator failed")
            return self._refuse(INTERNAL, f"the NPU simulator failed: {error}")

    def _refuse(self, code: int, message: str) -> int:
        for device in range(self.cann.devices):
            self.cann.explain(device, message)
        return code

    @staticmethod
    def _give(out: Any, number: int) -> None:
        if out:
            out[0] = ctypes.c_void_p(number)

    # ---- capture ----

    def _capture_begin(self, stream: int, mode: int, out: Any) -> int:
        if stream in self._captures:
            return self._refuse(CAPTURED, "the stream is already captured")
        device = torch.npu.current_device()
        left = self.cann.streams_left(device)
        if left < 1:
            return self._refuse(NO_STREAM, "Alloc sq cq fail: the device has no stream left for another graph")
        self.cann.set_streams_left(device, left - 1)
        automatic = any(isinstance(mode, _GraphDispatchMode) for mode in _get_current_dispatch_mode_stack())
        capture = Capture(next(self._numbers), stream, device, threading.get_ident(), automatic)
        self._captures[stream] = capture
        self.cann.attend(1)
        return OK

    def _capture_end(self, stream: int, _: int, out: Any) -> int:
        capture = self._captures.get(stream)
        if capture is None or capture.stream != stream:
            return self._refuse(NOT_CAPTURED, "the stream is not captured")
        for captured in [capture.stream, *capture.streams]:
            self._captures.pop(captured, None)
        self.cann.attend(-1)
        code, message = OK, ""
        if capture.thread != threading.get_ident():
            code, message = WRONG_THREAD, "a capture must end in the thread that began it"
        elif capture.broken:
            code, message = INVALIDATED, capture.broken
        elif capture.group is not None:
            code, message = GROUP_STATUS, "a task group was begun and not ended"
        elif any(capture.streams.values()):
            code, message = UNJOINED, "a side stream has work that the capturing stream does not wait for"
        if code:
            self.cann.set_streams_left(capture.device, self.cann.streams_left(capture.device) + 1)
            return self._refuse(code, message)
        taken = 1 + len(capture.streams)
        self.cann.set_streams_left(capture.device, self.cann.streams_left(capture.device) - len(capture.streams))
        graph = Graph(capture.number, capture.device, capture.tasks, taken)
        for group in capture.groups:
            group.graph = graph
        self.graphs[capture.number] = graph
        self._give(out, capture.number)
        return OK

    def _capture_info(self, stream: int, _: int, out: Any) -> int:
        capture = self._captures.get(stream)
        if capture is None:
            return 0
        self._give(out, capture.number)
        return 2 if capture.broken else 1

    def _destroy(self, number: int, _: int, out: Any) -> int:
        graph = self.graphs.pop(number, None)
        if graph is not None:
            if self.replays.drop(graph):
                _log.error("graph %d was destroyed while a replay of it waited to be updated", number)
            self.cann.set_streams_left(graph.device, self.cann.streams_left(graph.device) + graph.taken)
        return OK

    def _spoil(self, capture: Capture, code: int, message: str) -> int:
        capture.broken = capture.broken or message
        return self._refuse(code, message)

    # ---- operators ----

    def intercept(self, operator: Operator, device: int, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """(True, result) if the call belongs to a capture or an update; (False, None) if it must run now."""
        stream = raw_stream(device)
        with self._lock:
            capture = self._captures.get(stream)
            if capture is not None:
                try:
                    return True, self._record(capture, stream, operator, args, kwargs)
                except BaseException as error:
                    capture.broken = capture.broken or str(error)
                    raise
            if stream in self._updates:
                return True, self._replace(stream, operator, args, kwargs)
            code = self.replays.wait(stream)
        if code:
            raise RuntimeError(
                f"{operator.name} was issued on a stream whose graph still waits for an external event after "
                f"{self.replays.patience} s (error code is {code}). The simulator runs operators when they are issued: "
                "update the graph before other work follows its replay"
            )
        return False, None

    def _record(self, capture: Capture, stream: int, operator: Operator, args: Any, kwargs: Any) -> Any:
        check_capturable(operator, args, kwargs)
        if operator.updatable and capture.automatic and capture.group is None:
            raise CaptureError(
                f"error code is {GROUP_STATUS}: {operator.name} is captured outside a task group although "
                "auto_dispatch_capture is on: no update would reach it, and its lengths would stay those of the capture"
            )
        if operator.shape is None:
            raise CaptureError(f"error code is {UNSUPPORTED}: {operator.name} cannot be part of a graph")
        call = Call(self.engine.aliases, args, kwargs)
        operator.allow(call)
        task = Task(operator, call)
        shapes = Shapes(self.engine.aliases, task)
        try:
            shaped = operator.shape(*shapes.meta(call.args), **shapes.meta(call.kwargs))
        except (ConstraintError, CaptureError):
            raise
        except Exception as error:
            raise CaptureError(
                f"error code is {UNSUPPORTED}: {operator.name} in a capture: the shape of its result depends on values "
                f"({error})"
            ) from error
        result = shapes.result(shaped)
        call.release()
        if shapes.views and not task.results:
            return result  # a view needs no device
        capture.tasks.append(task)
        if capture.group is not None:
            capture.group.tasks.append(task)
        if stream != capture.stream:
            capture.streams[stream] = True
        return result

    def _replace(self, stream: int, operator: Operator, args: Any, kwargs: Any) -> Any:
        group, done = self._updates[stream]
        if done >= len(group.tasks) or group.tasks[done].operator is not operator:
            held = ", ".join(task.operator.name for task in group.tasks) or "nothing"
            raise RuntimeError(
                f"a task group of {held} cannot be updated by {operator.name} as its call {done + 1}; "
                f"error code is {UPDATE_FAILED}"
            )
        if group.tasks[done].results:
            raise RuntimeError(
                f"{operator.name} allocates its result: only an overload that writes to given tensors (.out) can be "
                f"updated; error code is {UPDATE_FAILED}"
            )
        call = Call(self.engine.aliases, args, kwargs)
        if operator.shape is not None:
            operator.shape(*to_meta(call.args), **{name: to_meta(value) for name, value in call.kwargs.items()})
        call.release()
        group.tasks[done].call = call
        self._updates[stream] = (group, done + 1)
        outputs = kwargs.get("out")
        return tuple(outputs) if isinstance(outputs, (list, tuple)) else outputs

    # ---- task groups ----

    def _group_begin(self, stream: int, _: int, out: Any) -> int:
        capture = self._captures.get(stream)
        if capture is None:
            return self._refuse(NOT_CAPTURED, "a task group belongs to a capture")
        if capture.group is not None:
            return self._spoil(capture, GROUP_STATUS, "a task group is already begun")
        capture.group = Group(next(self._numbers))
        return OK

    def _group_end(self, stream: int, _: int, out: Any) -> int:
        capture = self._captures.get(stream)
        if capture is None:
            return self._refuse(NOT_CAPTURED, "a task group belongs to a capture")
        if capture.group is None:
            return self._spoil(capture, GROUP_STATUS, "no task group was begun")
        self._groups[capture.group.number] = capture.group
        capture.groups.append(capture.group)
        self._give(out, capture.group.number)
        capture.group = None
        return OK

    def _update_begin(self, stream: int, handle: int, out: Any) -> int:
        group = self._groups.get(handle)
        if group is None or stream in self._updates or stream in self._captures:
            return self._refuse(GROUP_STATUS, "no such task group, or an update is already begun on the stream")
        if group.graph is not None:
            ended = group.graph.replays[: len(group.graph.replays) - self.replays.unfed(group.graph)]
            if ended and not self.order.is_behind(stream, *ended[-1]):
                return self._refuse(
                    UPDATE_FAILED,
                    "the update may overtake the graph's replay before, and change the lengths that it reads: let the "
                    "update's stream wait for an event behind that replay",
                )
        self._updates[stream] = (group, 0)
        self.cann.attend(1)
        return OK

    def _update_end(self, stream: int, _: int, out: Any) -> int:
        if stream not in self._updates:
            return self._refuse(GROUP_STATUS, "no update was begun on the stream")
        group, done = self._updates.pop(stream)
        self.cann.attend(-1)
        if done != len(group.tasks):
            return self._refuse(UPDATE_FAILED, f"{done} of the group's {len(group.tasks)} operators were updated")
        return OK

    # ---- replay ----

    def _execute(self, number: int, stream: int, out: Any) -> int:
        graph = self.graphs.get(number)
        if graph is None:
            return self._refuse(PARAM_INVALID, "no such graph")
        if stream in self._captures:
            return self._spoil(self._captures[stream], UNSUPPORTED, "a replay inside a capture")
        for task in graph.tasks:
            if isinstance(task, Task):
                for address, size in task.ranges():
                    if not self.cann.is_live(address, size):
                        return self.replays.crash(
                            graph, f"{task.operator.name}: MPU address access is invalid: its tensor was freed"
                        )
        del graph.replays[:-8]
        graph.replays.append((stream, self.order.issue(stream)))
        return self.replays.begin(graph, stream)

    # ---- events ----

    def _event_record(self, event: int, stream: int, out: Any) -> int:
        capture = self._captures.get(stream)
        if capture is not None:
            capture.events[event] = stream
        else:
            self.order.record(event, stream)
        return OK

    def _event_wait(self, event: int, stream: int, out: Any) -> int:
        owner = next((c for c in self._captures.values() if event in c.events), None)
        here = self._captures.get(stream)
        if owner is None:
            self.order.wait(event, stream)
            return OK
        if here is None:
            self._captures[stream] = owner  # the stream joins the capture
            owner.streams.setdefault(stream, False)
            return OK
        if here is not owner:
            return self._spoil(here, DEPENDENCY, "the event belongs to another capture")
        source = owner.events[event]
        if source in owner.streams:
            owner.streams[source] = False
            if stream != owner.stream:
                owner.streams[stream] = True  # the work that it now represents must be joined too
        return OK

    def _event_destroy(self, event: int, _: int, out: Any) -> int:
        for capture in self._captures.values():
            capture.events.pop(event, None)
        self.order.forget(event)
        return OK

    def _value_write(self, pointer: int, stream: int, out: Any) -> int:
        word = Word.from_address(pointer)
        capture = self._captures.get(stream)
        if capture is not None:
            capture.tasks.append(ValueTask("write", word.address, word.value, word.mode))
            return OK
        return self.replays.write(word)

    def _value_wait(self, pointer: int, stream: int, out: Any) -> int:
        word = Word.from_address(pointer)
        task = ValueTask("wait", word.address, word.value, word.mode)
        capture = self._captures.get(stream)
        if capture is not None:
            capture.tasks.append(task)
            return OK
        return self.replays.wait_for(task)

    # ---- the host waits, or copies ----

    def _capturing_here(self) -> Capture | None:
        here = threading.get_ident()
        return next((capture for capture in self._captures.values() if capture.thread == here), None)

    def _synchronize(self, stream: int, timeout: int, out: Any) -> int:
        capture = self._captures.get(stream) if stream else self._capturing_here()
        if capture is not None:
            return self._spoil(capture, UNSUPPORTED, "a synchronisation during a capture")
        return self.replays.wait(stream) or self._waited(stream)

    def _synchronize_event(self, event: int, stream: int, out: Any) -> int:
        if not stream:
            return OK  # it was never recorded
        if stream in self._captures:
            return self._spoil(self._captures[stream], UNSUPPORTED, "a synchronisation during a capture")
        return self.replays.wait(stream) or self._waited(0, event)

    def _waited(self, stream: int, event: int = 0) -> int:
        wrong = self.order.host_waited(stream, event)
        return self._refuse(INTERNAL, f"pinned memory: {wrong}") if wrong else OK

    def _transfer(self, kind: int, stream: int, out: Any) -> int:
        capture = self._captures.get(stream) if stream else self._capturing_here()
        if capture is not None:
            return self._spoil(capture, UNSUPPORTED, "a copy that the simulator cannot keep, during a capture")
        return self.replays.wait(stream) if stream else OK

    def _query(self, stream: int, event: int, out: Any) -> int:
        if self.replays.waits(stream):
            return 1
        if self._waited(0 if event else stream, event):
            self.cann.fail(torch.npu.current_device(), INTERNAL, "pinned memory was written to before its copy had run")
        return 0
