"""InFlightWrites: pages written by steps in flight, which may contain NaN or infinity.

Such a value corrupts the next owner of the page, because attention multiplies masked values by zero. A request may end,
and its pages get a new owner, while a step that writes to them is in flight.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernels.contract.step import RowError
from kernels.core.arrays import Ints, Longs

__all__ = ["InFlightWrites", "StepWrites"]


@dataclass(frozen=True, eq=False)
class StepWrites:
    """The pages that the step ``number`` writes to. Row r belongs to the request of ``slots[r]`` and
    ``generations[r]``, and writes to the columns ``first[r] .. last[r]`` of its pages.

    ``pages`` int32 [rows, columns].
    """

    slots: Longs
    generations: Ints
    first: Longs
    last: Longs
    pages: Ints
    number: int = 0

    def pages_of(self, slot: int, generation: int) -> list[int]:
        """Pages that this request writes to."""
        (rows,) = np.nonzero((self.slots == slot) & (self.generations == generation))
        return [page for row in rows for page in self.pages[row, self.first[row] : self.last[row] + 1].tolist()]

    def columns(self, slot: int, generation: int) -> tuple[int, int]:
        """The first and the last column that this request writes to."""
        (rows,) = np.nonzero((self.slots == slot) & (self.generations == generation))
        return int(self.first[rows].min()), int(self.last[rows].max())

    def all(self) -> Ints:
        """Pages that any row writes to."""
        columns = np.arange(self.pages.shape[1])
        return self.pages[(columns >= self.first[:, None]) & (columns <= self.last[:, None])]


class InFlightWrites:
    """Writes of the steps without a result. The model's thread begins steps and takes nonfinite rows; the thread that
    waits for results finishes steps."""

    def __init__(self) -> None:
        self.kept_from = sys.maxsize
        """``take_broken`` leaves steps of this number and later ones."""
        self._running: list[StepWrites] = []
        self._finished: deque[tuple[StepWrites, Sequence[RowError]]] = deque()

    def begin(self, writes: StepWrites) -> None:
        """Record a launched step."""
        self._running.append(writes)

    def finish(self, writes: StepWrites, nonfinite: Sequence[RowError]) -> None:
        """Record the result of a step. ``nonfinite``: its rows that are not finite."""
        self._finished.append((writes, nonfinite))

    @property
    def is_empty(self) -> bool:
        """Whether no step is in flight, and no finished one waits for ``take_broken``."""
        return not (self._running or self._finished)

    def take_broken(self) -> list[tuple[StepWrites, RowError]]:
        """Forget the finished steps. -> their rows that are not finite, each with its step's writes."""
        result: list[tuple[StepWrites, RowError]] = []
        while self._finished and self._finished[0][0].number < self.kept_from:
            writes, nonfinite = self._finished.popleft()
            self._running.remove(writes)
            result += [(writes, error) for error in nonfinite]
        return result

    def among(self, pages: Ints) -> list[int]:
        """The ``pages`` that a step writes to whose result was unknown at the last ``take_broken``."""
        if not self._running or not len(pages):
            return []
        result: list[int] = pages[np.isin(pages, np.concatenate([writes.all() for writes in self._running]))].tolist()
        return result
