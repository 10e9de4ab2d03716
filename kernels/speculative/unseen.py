"""Decodes that nobody guessed in, kept on the host until the drafter sees those of a slot together.

Seen one by one they would cost as much as a draft. Nothing is put together for them in the meantime: a step that makes
no guesses is to cost what it costs an engine that makes none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.rows import ragged
from kernels.slots import SlotTable
from kernels.speculative.host_drafts import Raw, SeenHere

__all__ = ["Unseen", "most_unseen"]

SLOT_BYTES = 1 << 20
"""Of features that are kept of a slot, at most."""
LEAST, MOST = 64, 256
"""Tokens of a slot that are kept at most, were its features large or none."""

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


def most_unseen(width: int) -> int:
    """Tokens of a slot that are kept at most, with so many features each."""
    return min(max(SLOT_BYTES // (2 * max(width, 1)), LEAST), MOST)


@dataclass
class _Stretch:
    """Steps in a row of the same requests: their positions in the first, and from which feature on each step's lie."""

    slots: Longs
    generations: Ints
    positions: Longs
    begins: list[int]


class Unseen:
    """``width``: of a token's features; 0 where they are of no use."""

    def __init__(self, state: SlotTable, width: int) -> None:
        self._state, self._width = state, width
        self._most = most_unseen(width)
        room = len(state.known) * self._most
        self._features: Raw = np.zeros((room, width), dtype=np.int16)  # taken from the system as it is written
        self._kept = self._steps = 0
        self._stretches: list[_Stretch] = []

    def add(self, slots: Longs, generations: Ints, positions: Longs, features: Raw | None) -> bool:
        """A token of each slot, at the position after the one before. -> whether there is room for another step.
        ``features`` [rows, width]."""
        self._stretches.append(_Stretch(slots, generations, positions, []))
        return self._keep(slots, features)

    def goes_on(self, slots: Longs) -> bool:
        """Whether ``slots`` are what was added last, and room is left after one more step of them."""
        return bool(self._stretches) and self._stretches[-1].slots is slots and self._steps + 1 < self._most

    def more(self, slots: Longs, features: Raw | None) -> bool | None:
        """The same, one position on; None, and nothing is kept, when ``slots`` is not what was added last."""
        if not self._stretches or self._stretches[-1].slots is not slots:
            return None
        return self._keep(slots, features)

    def _keep(self, slots: Longs, features: Raw | None) -> bool:
        begin, rows = self._kept, len(slots)
        if features is not None:
            self._features[begin : begin + rows] = features
        self._stretches[-1].begins.append(begin)
        self._kept, self._steps = begin + rows, self._steps + 1
        return self._steps < self._most

    def take(self) -> SeenHere | None:
        """All of requests that are there still, those with the fewest tokens first; nothing is kept then."""
        stretches, self._stretches = self._stretches, []
        self._kept = self._steps = 0
        if not stretches:
            return None
        state = self._state
        slots, positions, places = [], [], []
        for each in stretches:
            alive = np.flatnonzero(state.active[each.slots] & (state.generation[each.slots] == each.generations))
            steps = np.arange(len(each.begins))[:, None]
            slots.append(np.tile(each.slots[alive], len(steps)))
            positions.append((each.positions[alive] + steps).reshape(-1))
            places.append((np.array(each.begins)[:, None] + alive).reshape(-1))
        owners, at, found = (np.concatenate(parts) for parts in (slots, positions, places))
        if not len(owners):
            return None
        order = np.lexsort((at, owners))
        named, first, counts = np.unique(owners[order], return_index=True, return_counts=True)
        least = np.argsort(counts, kind="stable")
        rows = ragged(first[least], counts[least])
        features = self._features if self._width else None
        return SeenHere(named[least], at[order][first[least]], counts[least], features, found[order][rows])
