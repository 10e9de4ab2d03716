"""Runs short prompts, ends of longer ones, and decodes in the same step, in one native call on the CPU.

Every row runs to its last known token. Without it, half of the time to the first token of a short prompt on a small
model is Python around the model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.contract.runner import RunningStep
from kernels.contract.step import RowError, StepBatch, StepResult, StepTiming
from kernels.core.arrays import unpack_ints
from kernels.core.batch import ForwardBatch
from kernels.devices.prepared import PassLogits, PrefillCall
from kernels.execution.pending_step import PendingStep, StepContext
from kernels.state.step_rows import PrefilledRows

__all__ = ["NativePrefill"]

LONGEST = 48
"""The most tokens of a row. Attention of longer rows runs in blocks."""
TOKENS = 256
"""The most tokens of a step. In longer steps the Python around the model does not matter."""


class NativePrefill:
    """Takes steps of up to ``max_rows`` rows. ``features``: the array to which the pass writes each token's features,
    as raw bits. ``logits`` [rows, vocab]: those of the rows' ends. ``unobserved``: as in ``NativeDecode``."""

    def __init__(
        self,
        context: StepContext,
        call: PrefillCall,
        features: npt.NDArray[np.int16],
        logits: Tensor,
        max_rows: int,
        unobserved: bool = False,
    ) -> None:
        loaded = context.loaded
        self._context, self._state, self._sampler = context, loaded.slots, loaded.sampler
        self._speculator = None if unobserved else loaded.speculator
        self._prefill, self._features, self._max_rows, self._unobserved = call, features, max_rows, unobserved
        self._draws = loaded.device.sampling.draw is not None
        self._logits, self._grammars = logits, context.native_grammars

    @classmethod
    def make(
        cls, context: StepContext, windows: Sequence[int], max_rows: int, unobserved: bool = False, capture: bool = True
    ) -> NativePrefill | None:
        """The executor; None if the device makes no such calls. ``capture``: see ``NativeModel.make``."""
        loaded = context.loaded
        device, model, greedy = loaded.device, loaded.model, loaded.device.sampling.greedy
        if greedy is None or loaded.slots.here is None:
            return None
        kept: list[Tensor] = []

        def forward(batch: ForwardBatch) -> Tensor:
            result = model.forward(batch, loaded.caches, capture)
            kept.extend(model.split(result) if capture else (result, result))
            return result

        body = device.capture.native_pass(forward, windows, TOKENS)
        if body is None or kept[0].dtype != torch.bfloat16:
            return None
        hidden, features = kept
        last = hidden.new_zeros(max_rows, hidden.shape[1])

        def head(batch: ForwardBatch) -> Tensor:
            assert batch.states is not None
            logits = model.logits(batch.states)
            kept.extend((logits, *greedy(logits)))
            return logits

        heading = device.capture.native_pass(head, windows, max_rows, last)
        if heading is None:
            return None
        logits, argmax, nonfinite = kept[2:]
        call = body.prefill(heading, loaded.slots.table, hidden, last, PassLogits(logits, argmax), nonfinite.numpy())
        bits: npt.NDArray[np.int16] = features.view(torch.int16).numpy()
        return cls(context, call, bits, logits, max_rows, unobserved)

    def execute(self, step: PendingStep) -> RunningStep | None:
        if step.batch.draft_limits or step.batch.unobserved is not self._unobserved:
            return None
        return self._execute_prepared(step)

    @torch.inference_mode()
    def _execute_prepared(self, step: PendingStep) -> RunningStep | None:
        batch, builder = step.batch, step.prepare()
        if builder.failed:
            return None
        prepared = time.perf_counter()
        found = self.run(batch)
        if found is None:
            return None
        if self._speculator is not None:
            self._speculator.record_prompts(found, builder.generations)
        ended, rows = time.perf_counter(), len(found.slots)
        timing = StepTiming(
            prepare=prepared - step.begun,
            run=ended - prepared,
            graph_rows=rows,
            draft=builder.draft,
            total=ended - step.begun,
        )
        accepted = np.ones(rows, dtype=np.int32).tobytes()
        result = StepResult(batch.number, accepted=accepted, tokens=found.tokens, failed=found.failed, timing=timing)
        return RunningStep(lambda: result, True, None if self._speculator is None else self._context.idle_work)

    def run(self, batch: StepBatch) -> PrefilledRows | None:
        """Run the rows of a prepared step. None if they do not fit or one is not finite; state is unchanged then."""
        slots, generations, counts = (unpack_ints(part) for part in (batch.slots, batch.generations, batch.counts))
        state = self._state
        if not 0 < len(slots) <= self._max_rows or not 1 < counts.max() <= LONGEST or counts.sum() > TOKENS:
            return None
        if state.errors(slots, generations, counts):
            return None
        at = slots.astype(np.int64)
        starts, run = state.computed[at], counts.astype(np.int64)
        if (starts + run != state.known[at]).any() or (state.prompt_logprobs[at] >= 0).any():
            return None
        named = tuple(slots.tolist())
        if not self._sampler.unedited(named):
            return None
        some = self._sampler.masked(named)
        draws = self._sampler.draws(named, greedy=bool(some))
        if (draws is not None and not self._draws) or (some and self._grammars is None):
            return None
        masked, masks = None, None
        if some and self._grammars is not None:
            masked = self._grammars.rows(named, some)
            masks = self._grammars.masks(masked, len(slots))
        tokens = self._prefill(at, starts, run, draws, masks)
        if tokens is None:
            return None
        failed: tuple[RowError, ...] = ()
        if masked is not None and self._grammars is not None:
            tokens, failed = self._grammars.check(masked, self._logits, tokens)
        return PrefilledRows(tokens, at, starts, run, self._features, failed)
