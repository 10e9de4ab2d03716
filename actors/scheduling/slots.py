"""Slots of the worker, their generations and unsent releases."""

from __future__ import annotations

import numpy as np

__all__ = ["Slots"]


class Slots:
    """Slots ``1 .. max_slots - 1``. Every use of a slot has its own generation, also across worker restarts."""

    def __init__(self, max_slots: int) -> None:
        self._generations = [0] * max_slots
        self._free = list(range(max_slots - 1, 0, -1))
        self._released: list[int] = []

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> tuple[int, int]:
        """Take a free slot; returns it with its new generation. A slot returned since the last batch is released by the
        same batch."""
        slot = self._free.pop()
        self._generations[slot] += 1
        return slot, self._generations[slot]

    def give_back(self, slot: int) -> None:
        self._free.append(slot)
        self._released.append(slot)

    def take_released(self) -> bytes:
        """Slots returned since the last call, int32: the next batch must carry them."""
        if not self._released:
            return b""
        slots, self._released = np.array(self._released, dtype=np.int32).tobytes(), []
        return slots

    def reset(self) -> None:
        """Empty all slots, for a new worker."""
        self._free = list(range(len(self._generations) - 1, 0, -1))
        self._released = []
