"""Native operators are run one by one, or recorded to be run later in one call.

While they are recorded, operators compute nothing: they give their output a place in memory and note themselves down.
A place is given to another output once it is no longer referenced, exactly as it will be free when the program runs in
the same order.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.devices.cpu.native.library import Library, Op, Step

__all__ = ["NotNative", "OperatorRunner", "Recording"]

_MANY_ROWS = 64  # whose outputs an allocator would give back to the system


class NotNative(RuntimeError):
    """Something in a forward pass has no native operator, so that no program can be made of it."""


class OperatorRunner:
    """Runs native operators on ``threads`` threads, or records them.

    ``batch_invariant``: products with weights of few bits treat few rows as they treat many, so that a row's result
    depends on no other.
    """

    def __init__(self, library: Library, threads: int, batch_invariant: bool = False) -> None:
        self.library = library
        self.batch_invariant = batch_invariant
        engine = library.open(threads)
        if engine is None:
            raise RuntimeError(f"the system did not start {threads} threads for native operators; lower --cpu-threads")
        self._engine = engine
        self._close = weakref.finalize(self, library.close, engine)
        self._recording: Recording | None = None
        self._arena = _Arena()

    @property
    def address(self) -> int:
        """The engine's address, for functions of the library."""
        return int(self._engine)

    @property
    def recording(self) -> bool:
        return self._recording is not None

    @contextmanager
    def record(self, rows: int) -> Iterator[Recording]:
        """Record what is called meanwhile."""
        self._recording = recording = Recording(rows)
        try:
            yield recording
        finally:
            self._recording = None

    def run(self, ops: Any, count: int, step: Step) -> None:
        self.library.run(self._engine, ops, count, step)

    def _call(self, op: Op, step: Step, *keep_alive: object) -> None:
        if self._recording is not None:
            self._recording.add(op, keep_alive)
        else:
            self.library.run(self._engine, ctypes.byref(op), 1, step)

    def _empty(self, rows: int, width: int) -> Tensor:
        if self._recording is not None:
            return self._recording.empty(rows, width)
        if rows < _MANY_ROWS:
            return torch.empty((rows, width), dtype=torch.bfloat16)
        return self._arena.empty(rows, width)


class _Arena:
    """Memory for outputs, reused once it is no longer referenced: writing to memory that is new to a process is
    slow."""

    def __init__(self) -> None:
        self._free: dict[int, list[npt.NDArray[np.uint16]]] = {}

    def empty(self, rows: int, width: int) -> Tensor:
        free = self._free.setdefault(width, [])
        memory = free.pop() if free else None
        if memory is None or len(memory) < rows * width + 32:
            memory = np.zeros(rows * width + 32, dtype=np.uint16)  # taken from the system as rows are first written
        start = -(memory.ctypes.data // 2) % 32  # a cache line's
        place = memory[start : start + rows * width]
        weakref.finalize(place, free.append, memory)  # the tensors of this memory hold it, views too
        return torch.from_numpy(place).view(torch.bfloat16).view(rows, width)


class Recording:
    """Operators, the tensors they need for good, and memory for their outputs."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.ops: list[Op] = []
        self.keep_alive: list[object] = []
        self._arena = _Arena()
        self.keep_alive.append(self._arena)

    def add(self, op: Op, keep_alive: tuple[object, ...]) -> None:
        self.ops.append(op)
        self.keep_alive.extend(keep_alive)

    def add_once(self, op: Op, *keep_alive: object) -> None:
        """Add an operator that a program needs once, before the first that reads what it finds."""
        if all(other.kind != op.kind for other in self.ops):
            self.add(op, keep_alive)

    def empty(self, rows: int, width: int) -> Tensor:
        if rows != self.rows:
            raise NotNative(f"an operator ran {rows} rows of {self.rows}")
        return self._arena.empty(rows, width)
