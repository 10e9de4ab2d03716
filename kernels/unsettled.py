"""Pages that may hold numbers that are not finite: those written by steps whose results nobody has seen yet.

A number that is not finite spoils who gets the page next: attention multiplies what it does not see by zero. A request
may end, and its pages be handed on, while a step that writes to them is under way and not known to be sound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.step import RowError

__all__ = ["StepWrites", "Unsettled"]

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StepWrites:
    """Where a step writes: row r, a request of ``slots`` and ``generations``, columns ``first .. last`` of its pages.

    ``pages`` int32 [rows, columns].
    """

    slots: Longs
    generations: Ints
    first: Longs
    last: Longs
    pages: Ints

    def of(self, slot: int, generation: int) -> list[int]:
        """Pages that this request writes to."""
        (rows,) = np.nonzero((self.slots == slot) & (self.generations == generation))
        return [page for row in rows for page in self.pages[row, self.first[row] : self.last[row] + 1].tolist()]

    def all(self) -> Ints:
        """Pages that any does."""
        columns = np.arange(self.pages.shape[1])
        return self.pages[(columns >= self.first[:, None]) & (columns <= self.last[:, None])]


class Unsettled:
    """Steps are begun and taken in the thread of the model, and settled in that of who waits for their results."""

    def __init__(self) -> None:
        self._running: list[StepWrites] = []
        self._settled: deque[tuple[StepWrites, Sequence[RowError]]] = deque()

    def begin(self, writes: StepWrites) -> None:
        """A step is given to the device."""
        self._running.append(writes)

    def settle(self, writes: StepWrites, broken: Sequence[RowError]) -> None:
        """Its result is known; ``broken``: the rows of it that are not finite."""
        self._settled.append((writes, broken))

    @property
    def nothing(self) -> bool:
        """Whether no step is under way, and there is nothing to take."""
        return not (self._running or self._settled)

    def take(self) -> list[tuple[StepWrites, RowError]]:
        """Rows that were found not to be finite since the last call, and the steps they were found in."""
        found: list[tuple[StepWrites, RowError]] = []
        while self._settled:
            writes, broken = self._settled.popleft()
            self._running.remove(writes)
            found += [(writes, error) for error in broken]
        return found

    def among(self, pages: Ints) -> list[int]:
        """Those of the ``pages`` that a step writes to whose result was not known at the last ``take``."""
        if not self._running or not len(pages):
            return []
        found: list[int] = pages[np.isin(pages, np.concatenate([writes.all() for writes in self._running]))].tolist()
        return found
