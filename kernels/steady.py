"""Steps of nothing but decodes whose logits nothing edits, where a platform runs the model in one call.

Such steps follow one another by the thousand, and on a small model what is done around them takes as long as they do:
nothing here is asked again that the step before has answered, and all of it is numpy's on the host.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.host_target import HostTarget
from kernels.platforms.operators import Draws
from kernels.platforms.rows import DecodeTokens
from kernels.sampling import Sampler
from kernels.slots import SlotTable
from kernels.step import StepBatch

__all__ = ["SteadyDecodes"]

_ONE = np.ones(1, dtype=np.int32).tobytes()

Longs = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class SteadyDecodes:
    """For up to ``max_rows`` rows."""

    def __init__(self, state: SlotTable, sampler: Sampler, target: HostTarget, max_rows: int) -> None:
        self._state = state
        self._sampler = sampler
        self._target = target
        self._max_rows = max_rows
        self._rows: tuple[bytes, bytes] | None = None  # slots and generations that were found fit
        self._slots: Longs = np.zeros(0, dtype=np.int64)
        self._draws: Draws | None = None

    def fits(self, batch: StepBatch) -> bool:
        """Whether its rows, releases, admissions and grants done, are such decodes."""
        rows = len(batch.slots) // 4
        if batch.counts != _ONE * rows or not 0 < rows <= self._max_rows:
            return False
        state = self._state
        if self._rows != (batch.slots, batch.generations):
            slots = np.frombuffer(batch.slots, dtype=np.int32)
            generations, counts = (np.frombuffer(part, dtype=np.int32) for part in (batch.generations, batch.counts))
            named = tuple(slots.tolist())
            if state.errors(slots, generations, counts) or not self._sampler.raced(named):
                return False
            self._draws = self._sampler.draws(named)
            if self._draws is not None and self._target.draw is None:
                return False
            self._slots, self._rows = slots.astype(np.int64), (batch.slots, batch.generations)
        slots = self._slots
        known, computed = state.known[slots], state.computed[slots]
        room = np.minimum(state.page_count[slots] * state.page_size, state.tokens.shape[1] - 1)
        return bool((computed + 1 == known).all() and (known <= room).all())

    @property
    def slots(self) -> Longs:
        """Those of the rows that fitted."""
        return self._slots

    @property
    def over(self) -> bool:
        """Whether their sequences are at their end, all of them: what comes of the step is of no use."""
        return not self._state.left(self._slots).any()

    def run(self) -> tuple[Longs, Bools]:
        """Run the rows that fitted. -> their tokens int64 [rows], and which are not finite bool [rows].

        Their slots are as they were: see ``keep``.
        """
        state, slots = self._state, self._slots
        assert state.here is not None
        lengths = state.known[slots]
        positions = lengths - 1
        columns = positions // state.page_size
        index = state.pages[slots, columns] * np.int64(state.page_size) + positions % state.page_size
        pages = state.pages[slots, : int(columns.max()) + 1]
        rows = DecodeTokens(state.here[slots, positions], positions, index, pages, lengths)
        return self._target.next(rows, self._draws, lengths)

    def keep(self, tokens: Longs) -> None:
        """Each row knows one token more."""
        state, slots = self._state, self._slots
        assert state.here is not None
        lengths = state.known[slots]
        state.here[slots, lengths] = tokens
        state.computed[slots] = lengths
        state.known[slots] = lengths + 1
