"""Decodes that nobody guessed in, kept on the host until the drafter sees those of a slot together.

Seen one by one they would cost as much as a draft. Nothing is put together for them in the meantime: a step that makes
no guesses is to cost what it costs an engine that makes none.

Where hardly a step guesses, prompts are kept here, too, and what does not fit is forgotten: a draft that has seen the
last of a sequence guesses well enough to show that guessing is worth it again, and requests after that are seen whole.
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
LAST = 32
"""Tokens of a slot that are left when some are forgotten, and of a prompt that is kept here."""

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


@dataclass
class _Chunks:
    """Rows of a step: ``counts`` tokens of each from ``positions`` on, whose features lie from ``begins`` on."""

    slots: Longs
    generations: Ints
    positions: Longs
    counts: Longs
    begins: Longs


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
        self._chunks: list[_Chunks] = []

    def add_chunks(
        self, slots: Longs, generations: Ints, positions: Longs, counts: Longs, features: Raw | None, places: Longs
    ) -> None:
        """``counts`` tokens of each slot from ``positions`` on, of which only the last are kept. Without room for them
        all is forgotten: tokens that have a gap behind them are of no use. ``places``: of the first of each among
        ``features`` [tokens, width]."""
        if not len(slots):
            return
        cut = np.maximum(counts - LAST, 0)
        some = counts - cut
        total = int(some.sum())
        room = len(self._features) - (LAST + 1) * len(self._state.known)  # beside that for steps that are left
        if self._kept + total > room:
            self._stretches, self._chunks = [], []
            self._kept = self._steps = 0
            if total > room:
                return
        begins = self._kept + np.cumsum(some) - some
        if features is not None:
            self._features[self._kept : self._kept + total] = features[ragged(places + cut, some)]
        self._chunks.append(_Chunks(slots, generations, positions + cut, some, begins))
        self._kept += total

    def forget(self) -> None:
        """Keep the last steps alone, once there are twice as many."""
        steps = self._steps
        if steps < 2 * LAST and self._kept < self._full:
            return
        while self._stretches and steps > LAST:
            over = self._stretches[0]
            cut = min(steps - LAST, over.steps)
            over.positions = over.positions + cut
            over.begin += cut * len(over.slots)
            over.steps -= cut
            steps -= cut
            if not over.steps and len(self._stretches) > 1:
                self._stretches.pop(0)
            elif not over.steps:
                break
        first = next((each.begin for each in self._stretches if each.steps), self._kept)
        self._chunks = [each for each in self._chunks if each.begins[0] >= first]
        for each in self._stretches:
            each.begin -= first
        for chunks in self._chunks:
            chunks.begins = chunks.begins - first
        self._features[: self._kept - first] = self._features[first : self._kept].copy()
        self._kept, self._steps = self._kept - first, steps

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

    @property
    def empty(self) -> bool:
        """Whether nothing is kept."""
        return not (self._stretches or self._chunks)

    def take(self) -> SeenHere | None:
        """Of requests that are there still the last tokens that follow one another, those with the fewest first;
        nothing is kept then."""
        stretches, self._stretches = self._stretches, []
        chunks, self._chunks = self._chunks, []
        self._kept = self._steps = 0
        if not (stretches or chunks):
            return None
        state = self._state
        slots, positions, places = [], [], []
        for part in chunks:
            alive = np.flatnonzero(state.active[part.slots] & (state.generation[part.slots] == part.generations))
            if len(alive):
                slots.append(np.repeat(part.slots[alive], part.counts[alive]))
                positions.append(ragged(part.positions[alive], part.counts[alive]))
                places.append(ragged(part.begins[alive], part.counts[alive]))
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
        if chunks:  # of a long prompt not all is here
            owned, gaps = owners[order], at[order] - np.arange(len(order))
            last = np.searchsorted(owned, owned, "right") - 1
            order = order[gaps == gaps[last]]
        named, first, counts = np.unique(owners[order], return_index=True, return_counts=True)
        least = np.argsort(counts, kind="stable")
        rows = ragged(first[least], counts[least])
        features = self._features if self._width else None
        return SeenHere(named[least], at[order][first[least]], counts[least], features, found[order][rows])
