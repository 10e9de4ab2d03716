"""The loaded simulated CANN: calls from Python to runtime.c, and the callback from runtime.c to Python."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernels.contract.npu_simulator import Spec
from kernels.devices.npu_simulator.build import CORE, LIBRARIES

__all__ = ["STREAMS", "Cann", "NativeCall"]

STREAMS = 2048
"""Streams of a device; each captured graph takes some (about two thousand)."""

NativeCall = Callable[[int, int, int, Any], int]
"""(kind of call, first argument, second argument, output pointer) -> an error code of CANN, 0 for none."""


class Cann:
    """The library, loaded into this process so that torch_npu finds it instead of CANN."""

    def __init__(self, folder: Path, spec: Spec, devices: int) -> None:
        for name in LIBRARIES:
            ctypes.CDLL(str(folder / f"lib{name}.so"), ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(folder / f"lib{CORE}.so"), ctypes.RTLD_GLOBAL)
        self.library = library
        self.spec, self.devices = spec, devices
        self.host_call: NativeCall | None = None
        door_type = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
        )
        self._callback = door_type(self._open)
        for name in ("simulator_used", "simulator_peak", "simulator_operator_timeout"):
            getattr(library, name).restype = ctypes.c_uint64
        library.simulator_is_live.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
        library.simulator_reserve.argtypes = (ctypes.c_int32, ctypes.c_uint64)
        library.simulator_configure.argtypes = (
            *(ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int, door_type),
        )
        library.simulator_configure(spec.soc_name.encode(), devices, spec.memory, STREAMS, self._callback)
        self.attention = ctypes.c_int32.in_dll(library, "simulator_attention")
        self._watched = ctypes.c_int32.in_dll(library, "simulator_watched")
        self._waits = ctypes.c_uint64.in_dll(library, "simulator_waits")
        self._lock = threading.Lock()

    def _open(self, what: int, first: int | None, second: int | None, out: Any) -> int:
        if self.host_call is None:
            return 107000
        return self.host_call(what, first or 0, second or 0, out)

    def attend(self, more: int) -> None:
        """Increment or decrement the reasons why operators, events and transfers must call Python first."""
        with self._lock:
            self.attention.value += more

    def watch(self, count: int) -> None:
        """Set the number of tasks in flight: events and synchronizations call Python while there are any."""
        self._watched.value = count

    def waits(self) -> int:
        """Number of synchronizations with streams, events and devices."""
        return int(self._waits.value)

    def is_live(self, address: int, size: int) -> bool:
        """Whether the range lies in allocated device memory."""
        return bool(self.library.simulator_is_live(address, size))

    def used(self, device: int) -> int:
        """Bytes of the device that this process holds."""
        return int(self.library.simulator_used(device))

    def peak(self, device: int) -> int:
        """The peak of ``used``."""
        return int(self.library.simulator_peak(device))

    def reserve(self, device: int, size: int) -> None:
        """Reserve ``size`` bytes of the device, as if another process used them."""
        self.library.simulator_reserve(device, size)

    def streams_left(self, device: int) -> int:
        """Number of streams that can still be created on the device."""
        return int(self.library.simulator_streams_left(device))

    def set_streams_left(self, device: int, count: int) -> None:
        """Set the number of streams that can still be created."""
        self.library.simulator_set_streams_left(device, count)

    def operator_timeout(self) -> float | None:
        """Timeout of kernels in seconds; None if it was never set."""
        return int(self.library.simulator_operator_timeout()) / 1e6 or None

    def error(self, device: int) -> int:
        """The sticky error of the device, 0 for none."""
        return int(self.library.simulator_broken(device))

    def explain(self, device: int, message: str) -> None:
        """The text of aclGetRecentErrMsg() for the device."""
        self.library.simulator_message(device, message.encode()[:1000])

    def fail(self, device: int, code: int, message: str) -> None:
        """Set the sticky error of the device (0: clear it); every call that uses the device then returns the code."""
        was = self.error(device)
        self.library.simulator_break(device, code, message.encode())
        if bool(was) != bool(code):
            self.attend(1 if code else -1)
