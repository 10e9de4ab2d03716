"""Decodes that nobody guessed in, kept on the host until the drafter sees those of a slot together.

Seen one by one they would cost as much as a draft. Nothing is put together for them in the meantime: a step that makes
no guesses is to cost what it costs an engine that makes none.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.rows import ragged
from kernels.slots import SlotTable
from kernels.speculative.host_drafts import Raw, SeenHere

__all__ = ["MOST", "Unseen"]

MOST = 64
"""Tokens of a slot that are kept, at most."""

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


class Unseen:
    """``width``: of a token's features; 0 where they are of no use."""

    def __init__(self, state: SlotTable, width: int) -> None:
        slots = len(state.known)
        self._state, self._width = state, width
        self._features: Raw = np.zeros((slots, MOST, width), dtype=np.int16)  # taken from the system as it is written
        self._starts: Longs = np.zeros(slots, dtype=np.int64)
        self._counts: Longs = np.zeros(slots, dtype=np.int64)
        self._generations: Ints = np.zeros(slots, dtype=np.int32)
        self._some = False

    def add(self, slots: Longs, generations: Ints, positions: Longs, features: Raw | None) -> bool:
        """A token of each slot, at the position after the one before. -> whether there is room for another one of each
        of them. ``features`` [rows, width]."""
        counts = self._counts[slots]
        first = counts == 0
        if first.any():
            some = slots[first]
            self._starts[some], self._generations[some] = positions[first], generations[first]
        if features is not None:
            self._features[slots, counts] = features
        self._counts[slots] = counts + 1
        self._some = True
        return int(counts.max()) + 1 < MOST

    def take(self) -> SeenHere | None:
        """All of requests that are there still, decodes first; nothing is kept then."""
        if not self._some:
            return None
        state, counts = self._state, self._counts
        slots = np.flatnonzero(counts)
        slots = slots[state.active[slots] & (state.generation[slots] == self._generations[slots])]
        slots = slots[np.argsort(counts[slots], kind="stable")]
        taken = counts[slots]
        counts[:] = 0
        self._some = False
        if not len(slots):
            return None
        flat = self._features.reshape(-1, self._width) if self._width else None
        return SeenHere(slots, self._starts[slots], taken, flat, ragged(slots * MOST, taken))
