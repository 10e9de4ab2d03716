"""Steps of nothing but decodes whose logits nothing edits, where a platform runs all of it in one call.

Such steps follow one another by the thousand, and on a small model what is done around them takes as long as they do:
nothing here is asked again that the step before has answered.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.host_target import HostTarget
from kernels.platforms.operators import Draws
from kernels.sampling import Sampler
from kernels.slots import SlotTable
from kernels.step import StepBatch

__all__ = ["SteadyDecodes"]

_ONE = np.ones(1, dtype=np.int32).tobytes()

Longs = npt.NDArray[np.int64]


class SteadyDecodes:
    """For up to ``max_rows`` rows."""

    def __init__(self, state: SlotTable, sampler: Sampler, target: HostTarget, max_rows: int) -> None:
        self._state = state
        self._sampler = sampler
        self._draw = target.draw
        self._advance = target.run.advance(state.table, target.logits, target.tokens, target.broken)
        self._max_rows = max_rows
        self._rows: tuple[bytes, bytes, bytes] | None = None  # slots, generations and counts that were found fit
        self._slots: Longs = np.zeros(0, dtype=np.int64)
        self._draws: Draws | None = None

    def again(self, batch: StepBatch) -> bool:
        """Whether its rows are those that fitted last, and but for grants nothing else is in it."""
        return self._rows == (batch.slots, batch.generations, batch.counts) and not (
            batch.admitted or batch.released or batch.drafts
        )

    def fits(self, batch: StepBatch) -> bool:
        """Whether its rows, releases, admissions and grants done, are such decodes, as far as ``run`` does not see."""
        asked = (batch.slots, batch.generations, batch.counts)
        if self._rows == asked:
            return True
        rows = len(batch.slots) // 4
        if batch.counts != _ONE * rows or not 0 < rows <= self._max_rows:
            return False
        slots, generations, counts = (np.frombuffer(part, dtype=np.int32) for part in asked)
        named = tuple(slots.tolist())
        if self._state.errors(slots, generations, counts) or not self._sampler.raced(named):
            return False
        draws = self._sampler.draws(named)
        if draws is not None and self._draw is None:
            return False
        self._slots, self._rows, self._draws = slots.astype(np.int64), asked, draws
        return True

    @property
    def slots(self) -> Longs:
        """Those of the rows that fitted."""
        return self._slots

    def run(self) -> bytes | None:
        """Run the rows that fitted: see ``Advance``."""
        if self._state.stops and not self._state.left(self._slots).any():
            return b""
        return self._advance(self._slots, self._draws)
