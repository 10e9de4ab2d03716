"""Slots of the worker, their generations, and those it has yet to be told are free."""

from __future__ import annotations

import numpy as np

__all__ = ["Slots"]


class Slots:
    """Slots ``1 .. max_slots - 1``. Every taking of a slot has a generation of its own, over worker restarts too."""

    def __init__(self, max_slots: int) -> None:
        self._generations = [0] * max_slots
        self._free = list(range(max_slots - 1, 0, -1))
        self._released: list[int] = []

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> tuple[int, int]:
        """A free slot and its new generation. A slot given back since the last batch is released by that same batch."""
        slot = self._free.pop()
        self._generations[slot] += 1
        return slot, self._generations[slot]

    def give_back(self, slot: int) -> None:
        self._free.append(slot)
        self._released.append(slot)

    def released(self) -> bytes:
        """Slots given back since the last call, int32: the next batch must carry them."""
        if not self._released:
            return b""
        slots, self._released = np.array(self._released, dtype=np.int32).tobytes(), []
        return slots

    def reset(self) -> None:
        """A new worker: all slots are empty."""
        self._free = list(range(len(self._generations) - 1, 0, -1))
        self._released = []
