"""Runs decodes without draft tokens and logit edits in one native call on the CPU; grammars check what it has sampled.

For a small model, the Python code around such a step takes as long as the step itself. So rows that the previous step
has checked are not checked again.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from kernels.contract.runner import RunningStep
from kernels.contract.step import RowError, StepBatch, StepResult, StepTiming
from kernels.core.arrays import Longs, unpack_ints
from kernels.core.operators import Draws
from kernels.execution.pending_step import PendingStep, StepContext
from kernels.models.native_model import NativeModel
from kernels.state.native_grammars import MaskedRows

__all__ = ["NativeDecode", "skipped"]

_ONE = np.ones(1, dtype=np.int32).tobytes()


class NativeDecode:
    """Takes decodes of up to ``max_rows`` rows. ``unobserved``: takes only steps with ``StepBatch.unobserved``, else
    only those without."""

    def __init__(self, context: StepContext, model: NativeModel, max_rows: int, unobserved: bool = False) -> None:
        loaded = context.loaded
        self._context, self._in_flight_writes, self._speculator = context, context.in_flight_writes, loaded.speculator
        self._state, self._sampler = loaded.slots, loaded.sampler
        self._features = None if unobserved or loaded.speculator is None else model.features
        self._draw, self._max_rows, self._unobserved = model.draw, max_rows, unobserved
        self._advance = model.run.advance(loaded.slots.table, model.output)
        self._checked: tuple[bytes, bytes, bytes] | None = (
            None  # slots, generations and counts of the last checked rows
        )
        self._slots: Longs = np.zeros(0, dtype=np.int64)
        self._draws: Draws | None = None
        self._logits, self._grammars = model.logits, context.native_grammars
        self._masked: MaskedRows | None = None

    def execute(self, step: PendingStep) -> RunningStep | None:
        batch = step.batch
        if batch.draft_limits or batch.unobserved is not self._unobserved:
            return None
        if self._repeats(batch) and self._in_flight_writes.is_empty and step.grant():
            running = self.run(step)
            if running is not None:
                return running
        return self._execute_prepared(step)

    def _repeats(self, batch: StepBatch) -> bool:
        """Whether the step has the rows that were checked last and nothing else but grants, and the draft need not
        observe anything before it."""
        return (
            self._checked == (batch.slots, batch.generations, batch.counts)
            and not (batch.admitted or batch.released)
            and (self._speculator is None or self._speculator.is_settled(self._unobserved))
        )

    @torch.inference_mode()
    def _execute_prepared(self, step: PendingStep) -> RunningStep | None:
        builder = step.prepare()
        return None if builder.failed or not self.fits(step.batch) else self.run(step, builder.draft)

    def fits(self, batch: StepBatch) -> bool:
        """Whether all rows of a prepared step are decodes for this executor. ``run`` checks the rest."""
        columns = (batch.slots, batch.generations, batch.counts)
        if self._checked == columns:
            return True
        rows = len(batch.slots) // 4
        if batch.counts != _ONE * rows or not 0 < rows <= self._max_rows:
            return False
        slots, generations, counts = (unpack_ints(part) for part in columns)
        named = tuple(slots.tolist())
        if self._state.errors(slots, generations, counts) or not self._sampler.unedited(named):
            return False
        masked = self._sampler.masked(named)
        draws = self._sampler.draws(named, greedy=bool(masked))
        if (draws is not None and self._draw is None) or (masked and self._grammars is None):
            return False
        self._masked = self._grammars.rows(named, masked) if self._grammars is not None and masked else None
        self._slots, self._checked, self._draws = slots.astype(np.int64), columns, draws
        return True

    def run(self, step: PendingStep, seen: float = 0.0, skipped_drafts: bool = False) -> RunningStep | None:
        """Run the rows that were checked last. None if a row is not such a decode or is not finite; state is unchanged
        then. ``seen``: seconds that the observation took. ``skipped_drafts``: the step requested draft tokens, and
        there were none."""
        batch, prepared = step.batch, time.perf_counter()
        tokens = self.advance()
        if tokens is None:
            return None
        if not tokens:
            return skipped(batch)
        rows, failed = len(self._slots), tuple[RowError, ...]()
        if self._masked is not None and self._grammars is not None:
            tokens, failed = self._grammars.check(self._masked, self._logits, tokens)
        if self._features is not None:
            assert self._speculator is not None
            if skipped_drafts:
                self._speculator.record_skipped(self._slots, self._features[:rows], unpack_ints(batch.generations))
            else:
                self._speculator.defer(self._slots, self._features[:rows])
        ended, begun = time.perf_counter(), step.begun
        timing = StepTiming(
            prepare=prepared - begun, run=ended - prepared, graph_rows=rows, total=ended - begun, observe=seen
        )
        result = StepResult(batch.number, accepted=batch.counts, tokens=tokens, failed=failed, timing=timing)
        return RunningStep(lambda: result, True, self._context.idle_work if skipped_drafts else None)

    def advance(self) -> bytes | None:
        """Run the rows that were checked last: see ``DecodeCall``."""
        state = self._state
        if state.stops and state.may_be_over(self._slots) and not state.left(self._slots).any():
            return b""
        masks = None
        if self._masked is not None and self._grammars is not None:
            masks = self._grammars.masks(self._masked, len(self._slots))
        return self._advance(self._slots, self._draws, masks)


def skipped(batch: StepBatch) -> RunningStep:
    """The result of decodes whose sequences have all ended. Its tokens are zeros, which the scheduler drops."""
    result = StepResult(batch.number, accepted=batch.counts, tokens=bytes(len(batch.counts)))
    return RunningStep(lambda: result, True)
