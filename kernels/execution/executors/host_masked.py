"""Runs decodes of which some follow a grammar, on the CPU: the model and the draw are native, the masks lie between."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from kernels.contract.runner import RunningStep
from kernels.contract.step import StepBatch, StepResult, StepTiming
from kernels.core.arrays import Longs, unpack_ints
from kernels.core.attention_rows import DecodeTokens
from kernels.core.operators import Draws
from kernels.execution.pending_step import PendingStep, StepContext
from kernels.grammar.slots import GrammarSlots
from kernels.models.host_model import HostModel
from kernels.sampling.masks import RowMasks

__all__ = ["HostMasked"]


_APART = 4
"""Rows from which the masks are filled in another thread, while the model runs."""


class HostMasked:
    """Takes decodes of up to ``max_rows`` rows that no draft observes, without logit edits and log-probabilities.
    ``unobserved``: as in ``HostDecode``. As there, rows that the previous step has checked are not checked again."""

    def __init__(
        self, context: StepContext, model: HostModel, grammars: GrammarSlots, max_rows: int, unobserved: bool
    ) -> None:
        loaded = context.loaded
        self._in_flight_writes, self._speculator = context.in_flight_writes, loaded.speculator
        self._state, self._sampler, self._greedy = loaded.slots, loaded.sampler, loaded.device.sampling.greedy
        self._model, self._grammars, self._max_rows, self._unobserved = model, grammars, max_rows, unobserved
        self._checked: tuple[bytes, bytes, bytes] | None = None  # slots, generations and counts of the last checked
        self._slots: Longs = np.zeros(0, dtype=np.int64)
        self._named: tuple[int, ...] = ()
        self._draws: Draws | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="troupe-masks")

    def execute(self, step: PendingStep) -> RunningStep | None:
        batch = step.batch
        if not self._grammars or batch.draft_limits or batch.unobserved is not self._unobserved:
            return None
        if self._repeats(batch) and self._in_flight_writes.is_empty and step.grant():
            running = self._run(step)
            if running is not None:
                return running
        builder = step.prepare()
        return None if builder.failed or not self._fits(batch) else self._run(step)

    def _repeats(self, batch: StepBatch) -> bool:
        """Whether the step has the rows that were checked last, and nothing else but grants."""
        return (
            self._checked == (batch.slots, batch.generations, batch.counts)
            and not (batch.admitted or batch.released)
            and (self._speculator is None or self._speculator.is_settled(self._unobserved))
        )

    def _fits(self, batch: StepBatch) -> bool:
        """Whether all rows of a prepared step are decodes for this executor. ``_run`` checks the rest."""
        asked = (batch.slots, batch.generations, batch.counts)
        slots, generations, counts = (unpack_ints(part) for part in asked)
        named = tuple(slots.tolist())
        if not 0 < len(slots) <= self._max_rows or (counts != 1).any() or not self._sampler.masked(named):
            return False
        draws = self._sampler.draws(named)
        if self._state.errors(slots, generations, counts) or (draws is not None and self._model.draw is None):
            return False
        self._slots, self._named, self._checked, self._draws = slots.astype(np.int64), named, asked, draws
        return True

    @torch.inference_mode()
    def _run(self, step: PendingStep) -> RunningStep | None:
        """Run the rows that were checked last. None if one is not such a decode, is not finite or fails; state is
        unchanged then."""
        state, model, slots, prepared = self._state, self._model, self._slots, time.perf_counter()
        assert state.here is not None
        starts, known, size = state.computed[slots], state.known[slots], state.page_size
        if (
            (starts + 1 != known).any()
            or (known > state.page_count[slots] * size).any()
            or known.max() >= state.longest
        ):
            return None
        index = state.pages[slots, starts // size] * np.int64(size) + starts % size
        pages = np.ascontiguousarray(state.pages[slots, : int(starts.max()) // size + 1])
        rows, lengths = DecodeTokens(state.here[slots, starts], starts, index, pages, known), known.tolist()
        if len(slots) < _APART:
            model.run(rows)
            allowed = self._grammars.masks(self._named, lengths)
        else:
            filled = self._thread.submit(self._grammars.masks, self._named, lengths)
            try:
                model.run(rows)
            finally:
                allowed = filled.result()
        found = None if allowed.errors else self._sample(known, allowed.masks)
        if found is None or found[1].any():
            return None
        tokens = found[0].numpy().astype(np.int32)
        state.here[slots, known] = tokens
        state.computed[slots] += 1
        state.grew(slots)
        ended, batch = time.perf_counter(), step.batch
        timing = StepTiming(
            prepare=prepared - step.begun, run=ended - prepared, graph_rows=len(slots), whole=ended - step.begun
        )
        result = StepResult(batch.number, accepted=batch.counts, tokens=tokens.tobytes(), timing=timing)
        return RunningStep(lambda: result, True)

    def _sample(self, known: Longs, masks: RowMasks | None) -> tuple[Tensor, Tensor] | None:
        """The tokens of all rows, and whether their logits are not to be used."""
        model = self._model
        logits = model.logits[: len(known)]
        if masks is not None:
            masks.apply(logits)
        if self._draws is None or model.draw is None:
            return None if self._greedy is None else self._greedy(logits)
        return model.draw(logits, self._draws, torch.from_numpy(known), None, logits.shape[1])
