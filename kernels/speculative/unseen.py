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
    """``steps`` in a row of the same requests: their positions in the first, whose features lie from ``begin`` on,
    those of the others behind."""

    slots: Longs
    generations: Ints
    positions: Longs
    begin: int
    steps: int = 0


class Unseen:
    """``width``: of a token's features; 0 where they are of no use."""

    def __init__(self, state: SlotTable, width: int) -> None:
        self._state, self._width = state, width
        self._most = most_unseen(width)
        room = len(state.known) * self._most
        self._features: Raw = np.zeros((room, width), dtype=np.int16)  # taken from the system as it is written
        self._full = room - 2 * len(state.known)  # there may be no room for two more steps
        self._kept = self._steps = 0
        self._stretches: list[_Stretch] = []

    def drop(self) -> None:
        """Keep nothing."""
        self._stretches = []
        self._kept = self._steps = 0

    def add(self, slots: Longs, generations: Ints, positions: Longs, features: Raw | None) -> bool:
        """A token of each slot, at the position after the one before. -> whether there is room for two more steps.
        ``features`` [rows, width]."""
        stretch = _Stretch(slots, generations, positions, self._kept)
        self._stretches.append(stretch)
        return self._keep(stretch, features)

    def follows(self, slots: Longs) -> bool:
        """Whether ``slots`` are what was added last, and nothing was since."""
        last = self._stretches[-1] if self._stretches else None
        return last is not None and last.slots is slots and last.begin + last.steps * len(slots) == self._kept

    def more(self, features: Raw | None) -> bool:
        """The same of the slots that were added last, one position on."""
        return self._keep(self._stretches[-1], features)

    def _keep(self, stretch: _Stretch, features: Raw | None) -> bool:
        begin = self._kept
        self._kept = end = begin + len(stretch.slots)
        if features is not None:
            self._features[begin:end] = features
        stretch.steps += 1
        self._steps += 1
        return self._steps + 1 < self._most and end < self._full

    def accepted(self, seen: SeenHere, generations: Ints) -> bool:
        """What a step with guesses accepted of each slot. -> whether there was room for it, and is for two more steps;
        without that nothing is kept of it."""
        most, count = int(seen.counts.max()), len(seen.places)
        if self._steps + most + 1 >= self._most or self._kept + count >= self._full:
            return False
        slots, positions = np.repeat(seen.slots, seen.counts), ragged(seen.starts, seen.counts)
        begin, self._kept = self._kept, self._kept + count
        self._stretches.append(_Stretch(slots, np.repeat(generations, seen.counts), positions, begin, 1))
        if seen.features is not None:
            self._features[begin : self._kept] = seen.features[seen.places]
        self._steps += most
        return True

    @property
    def empty(self) -> bool:
        """Whether nothing is kept."""
        return not self._stretches

    def take(self) -> SeenHere | None:
        """Of requests that are there still the tokens, those with the fewest first; nothing is kept then."""
        stretches = self._stretches
        self.drop()
        if not stretches:
            return None
        state = self._state
        slots, positions, places = [], [], []
        for each in stretches:
            alive = np.flatnonzero(state.active[each.slots] & (state.generation[each.slots] == each.generations))
            steps = np.arange(each.steps)[:, None]
            slots.append(np.tile(each.slots[alive], len(steps)))
            positions.append((each.positions[alive] + steps).reshape(-1))
            places.append((each.begin + steps * len(each.slots) + alive).reshape(-1))
        if not any(map(len, slots)):
            return None
        owners, at, found = (np.concatenate(parts) for parts in (slots, positions, places))
        order = np.lexsort((at, owners))
        named, first, counts = np.unique(owners[order], return_index=True, return_counts=True)
        least = np.argsort(counts, kind="stable")
        rows = ragged(first[least], counts[least])
        features = self._features if self._width else None
        return SeenHere(named[least], at[order][first[least]], counts[least], features, found[order][rows])
