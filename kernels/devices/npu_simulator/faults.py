"""Fault injection for tests: the device fails like a real one, at the operator that the test names.

An error of a device is sticky: every later call that uses it fails with the same code and torch_npu's message ("NPU
function error ... error code is 507015"), until the test clears it. In a worker process the environment variable
TROUPE_NPU_FAULT plans one fault; it has no effect without the simulator:

    KIND@N, or KIND@N@NAME to count only the operators with NAME in theirs:
    aicore@N     507015 at the N-th operator       lost@N   507010, the device's heartbeat is lost
    ecc@N        507054, memory error              hang@N   the N-th operator does not end: after the time of
                                                      torch.npu.set_op_timeout_ms it is 507014, for a collective
                                                      507048; without one the process must be killed
    oom@N        from the N-th operator on no memory is left on the device
"""

from __future__ import annotations

import threading

from kernels.devices.npu_simulator.cann import Cann

__all__ = ["KINDS", "FaultError", "Faults"]

KINDS = {
    "aicore": (507015, "The aicore execution is abnormal: MPU address access is invalid (simulated)"),
    "lost": (507010, "The device lost its heartbeat (simulated)"),
    "ecc": (507054, "HBM multi-bit ECC error (simulated)"),
    "link": (507056, "A link of the device is down (simulated)"),
}


_HUNG = {
    False: (507014, "The aicore execution times out (simulated)"),
    True: (507048, "EI0002: Notify wait timeout: a peer did not take part in the collective (simulated)"),
}


class FaultError(ValueError):
    """The text does not describe a fault."""


class Faults:
    """The faults of the simulated devices of this process."""

    def __init__(self, cann: Cann) -> None:
        self.cann = cann
        self._plan: tuple[str, int, int | None, str] | None = None  # kind, operators left, device, part of a name
        self._lock = threading.Lock()

    def plan(self, kind: str, after: int, device: int | None = None, operator: str = "") -> None:
        """Plan a fault at the ``after``-th operator from now (1: the next), on one device or on any.

        ``operator``: count only operators whose name contains it: ``hccl`` for collectives.
        """
        if kind not in (*KINDS, "hang", "oom") or after < 1:
            raise FaultError(f"{kind!r} at operator {after}: use {', '.join(KINDS)}, hang or oom, and a number from 1")
        with self._lock:
            if self._plan is None:
                self.cann.attend(1)
            self._plan = (kind, after, device, operator)

    def plan_text(self, text: str) -> None:
        """``kind@N`` or ``kind@N@name``, as in the environment variable."""
        kind, number, name = [*text.split("@", 2), "", ""][:3]
        if not number.isdecimal():
            raise FaultError(f"{text!r} is not a fault: write a kind and an operator's number, as in aicore@100")
        self.plan(kind, int(number), operator=name)

    def clear(self) -> None:
        """Drop the plan and clear the errors of all devices."""
        with self._lock:
            if self._plan is not None:
                self.cann.attend(-1)
            self._plan = None
        for device in range(self.cann.devices):
            self.cann.fail(device, 0, "")
            self.cann.reserve(device, 0)

    def fail(self, device: int, kind: str = "aicore") -> None:
        """Set an error of the device now."""
        self.cann.fail(device, *KINDS[kind])

    def fill(self, device: int, left: int = 0) -> None:
        """Leave only ``left`` bytes of the device's memory for this process."""
        self.cann.reserve(device, max(0, self.cann.spec.memory - self.cann.used(device) - left))

    def scarce_streams(self, device: int, left: int) -> None:
        """Leave only ``left`` streams for graphs."""
        self.cann.set_streams_left(device, left)

    def before(self, operator: str, device: int) -> None:
        """Called before every operator while a fault is planned or active."""
        with self._lock:
            if self._plan is None or self._plan[2] not in (None, device) or self._plan[3] not in operator:
                return
            kind, left, where, name = self._plan
            if left > 1:
                self._plan = (kind, left - 1, where, name)
                return
            self._plan = None
            self.cann.attend(-1)
        if kind == "hang":
            threading.Event().wait(self.cann.operator_timeout())
            self.cann.fail(device, *_HUNG["hccl" in operator])
        elif kind == "oom":
            self.fill(device)
        else:
            code, message = KINDS[kind]
            self.cann.fail(device, code, f"{message}, at {operator}")
