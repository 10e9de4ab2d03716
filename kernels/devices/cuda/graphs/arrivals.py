"""Results that a step's last kernel writes directly to the host's memory, so that no copy delays the next step.

Each step has a place in a ring. The device counts the places, so that a replayed graph finds its place; the host counts
in parallel. Unread results are saved before their place is overwritten.
"""

from __future__ import annotations

import threading
from weakref import ref

import torch
from torch import Tensor

__all__ = ["ArrivalRing"]

_PLACES = 8
"""Places of a ring: more than there are steps in flight, so that saving unread results never waits."""


class _Arrival:
    """Waits for the results at ``here`` and caches them after the first call."""

    def __init__(self, here: Tensor, event: torch.cuda.Event | None) -> None:
        self._here, self._event, self._lock = here, event, threading.Lock()
        self._kept: Tensor | None = None

    def __call__(self) -> list[Tensor]:
        """Wait for the results. Callable in any thread."""
        with self._lock:
            if self._kept is None:
                if self._event is not None:
                    self._event.synchronize()
                self._kept = self._here.clone()
            return [self._kept]


class ArrivalRing:
    """``memory`` int32 [places, rows], which kernels write to, and ``place`` int32 [1] on ``device``: the place of the
    running step, which its first kernel increments. One thread uses it, with one current stream.
    """

    def __init__(self, rows: int, device: torch.device, places: int = _PLACES) -> None:
        self._at = 0
        self.memory = torch.zeros((places, rows), dtype=torch.int32, pin_memory=device.type == "cuda")
        self.place = torch.zeros(1, dtype=torch.int32, device=device)
        self._events = [torch.cuda.Event() for _ in range(places)] if device.type == "cuda" else []
        self._arrivals: list[ref[_Arrival] | None] = [None] * places

    def begin(self) -> None:
        """Reset, as if no step has run."""
        self.place.zero_()
        self._at = 0

    def clear(self) -> None:
        """Save unread results of the next step's place, before the step."""
        last = self._arrivals[(self._at + 1) % len(self._arrivals)]
        arrival = None if last is None else last()
        if arrival is not None:
            arrival()

    def follow(self, count: int) -> _Arrival:
        """Return, after a step is launched, a function that waits for the tokens of its first ``count`` rows, int32
        [count]."""
        self._at = at = (self._at + 1) % len(self._arrivals)
        event = self._events[at] if self._events else None
        if event is not None:
            event.record()
        arrival = _Arrival(self.memory[at, :count], event)
        self._arrivals[at] = ref(arrival)
        return arrival
