"""Runs decodes of which some follow a grammar, on the CPU: the model and the draw are native, the masks lie between."""

from __future__ import annotations

import time

import numpy as np
import torch

from kernels.contract.runner import RunningStep
from kernels.contract.step import StepResult, StepTiming
from kernels.core.arrays import unpack_ints
from kernels.core.attention_rows import DecodeTokens
from kernels.execution.pending_step import PendingStep, StepContext
from kernels.grammar.slots import GrammarSlots
from kernels.models.host_model import HostModel

__all__ = ["HostMasked"]


class HostMasked:
    """Takes decodes of up to ``max_rows`` rows that no draft observes, without logit edits and log-probabilities.
    ``unobserved``: as in ``HostDecode``."""

    def __init__(
        self, context: StepContext, model: HostModel, grammars: GrammarSlots, max_rows: int, unobserved: bool
    ) -> None:
        loaded = context.loaded
        self._state, self._sampler, self._greedy = loaded.slots, loaded.sampler, loaded.device.sampling.greedy
        self._model, self._grammars, self._max_rows, self._unobserved = model, grammars, max_rows, unobserved

    def execute(self, step: PendingStep) -> RunningStep | None:
        if step.batch.draft_limits or step.batch.unobserved is not self._unobserved:
            return None
        return self._execute_prepared(step)

    @torch.inference_mode()
    def _execute_prepared(self, step: PendingStep) -> RunningStep | None:
        builder, batch, state = step.prepare(), step.batch, self._state
        slots, generations, counts = (unpack_ints(part) for part in (batch.slots, batch.generations, batch.counts))
        if builder.failed or not 0 < len(slots) <= self._max_rows or (counts != 1).any():
            return None
        named = tuple(slots.tolist())
        if not self._sampler.masked(named) or state.errors(slots, generations, counts):
            return None
        prepared, at = time.perf_counter(), slots.astype(np.int64)
        tokens = self._run(at, named)
        if tokens is None:
            return None
        ended = time.perf_counter()
        timing = StepTiming(
            prepare=prepared - step.begun, run=ended - prepared, graph_rows=len(at), whole=ended - step.begun
        )
        result = StepResult(batch.number, accepted=batch.counts, tokens=tokens, timing=timing)
        return RunningStep(lambda: result, True)

    def _run(self, slots: np.ndarray[tuple[int], np.dtype[np.int64]], named: tuple[int, ...]) -> bytes | None:
        """The tokens int32 of all rows; None if one cannot run here or is not finite. State is unchanged then."""
        state, model = self._state, self._model
        draws = self._sampler.draws(named)
        assert state.here is not None
        starts, known = state.computed[slots], state.known[slots]
        if (starts + 1 != known).any() or (draws is not None and model.draw is None) or self._greedy is None:
            return None
        size = state.page_size
        index = state.pages[slots, starts // size] * np.int64(size) + starts % size
        pages = np.ascontiguousarray(state.pages[slots, : int(starts.max()) // size + 1])
        model.run(DecodeTokens(state.here[slots, starts], starts, index, pages, known))
        allowed = self._grammars.masks(named, known.tolist())
        if allowed.errors:
            return None
        logits = model.logits[: len(slots)]
        if allowed.masks is not None:
            allowed.masks.apply(logits)
        found = (
            self._greedy(logits)
            if draws is None or model.draw is None
            else model.draw(logits, draws, torch.from_numpy(known), None, logits.shape[1])
        )
        if found is None or found[1].any():
            return None
        tokens = found[0].numpy().astype(np.int32)
        state.computed[slots] += 1
        state.here[slots, known] = tokens
        state.grew(slots)
        return tokens.tobytes()
