"""Tokens that a step's last kernel writes to the host's memory itself: between two steps stands no copy.

Each step has a place of a ring. The device counts the places by itself, so that a graph finds its own; the host counts
along. What is still to be read of the place's last step is put aside before it is written again.
"""

from __future__ import annotations

import threading
from weakref import ref

import torch
from torch import Tensor

__all__ = ["ArrivalRing"]

_PLACES = 8
"""Of a ring: more than steps are in flight, so that nothing has to wait before it is put aside."""


class _Arrival:
    """Waits for what is brought ``here``; once it was asked it keeps it."""

    def __init__(self, here: Tensor, event: torch.cuda.Event | None) -> None:
        self._here, self._event, self._lock = here, event, threading.Lock()
        self._kept: Tensor | None = None

    def __call__(self) -> list[Tensor]:
        """In any thread."""
        with self._lock:
            if self._kept is None:
                if self._event is not None:
                    self._event.synchronize()
                self._kept = self._here.clone()
            return [self._kept]


class ArrivalRing:
    """``memory`` int32 [places, rows], which kernels write to, and ``place`` int32 [1] on ``device``: the one that is
    the running step's, which its first kernel moves on. One thread uses it, with one current stream.
    """

    def __init__(self, rows: int, device: torch.device, places: int = _PLACES) -> None:
        self._at = 0
        self.memory = torch.zeros((places, rows), dtype=torch.int32, pin_memory=device.type == "cuda")
        self.place = torch.zeros(1, dtype=torch.int32, device=device)
        self._events = [torch.cuda.Event() for _ in range(places)] if device.type == "cuda" else []
        self._arrivals: list[ref[_Arrival] | None] = [None] * places

    def begin(self) -> None:
        """No step has run: what did so far was none."""
        self.place.zero_()
        self._at = 0

    def clear(self) -> None:
        """Before a step: put aside what is still wanted of its place."""
        last = self._arrivals[(self._at + 1) % len(self._arrivals)]
        arrival = None if last is None else last()
        if arrival is not None:
            arrival()

    def follow(self, count: int) -> _Arrival:
        """Behind a step: what waits for the tokens of its first ``count`` rows, int32 [count], and gives them."""
        self._at = at = (self._at + 1) % len(self._arrivals)
        event = self._events[at] if self._events else None
        if event is not None:
            event.record()
        arrival = _Arrival(self.memory[at, :count], event)
        self._arrivals[at] = ref(arrival)
        return arrival
