"""Runs decodes with draft tokens but without logit edits in one native call on the CPU."""

from __future__ import annotations

import time

import torch

from kernels.contract.runner import RunningStep
from kernels.contract.step import StepResult, StepTiming
from kernels.execution.executors.native_decode import NativeDecode, skipped
from kernels.execution.pending_step import PendingStep, StepContext
from kernels.speculation.native_loop import NativeDraftLoop

__all__ = ["NativeChains"]


class NativeChains:
    """Takes decodes that draft. ``loop``: drafts and verifies. ``decode``: runs the rows if there is nothing to
    draft."""

    def __init__(self, context: StepContext, loop: NativeDraftLoop, decode: NativeDecode) -> None:
        assert context.loaded.speculator is not None
        self._context, self._speculator = context, context.loaded.speculator
        self._loop, self._decode = loop, decode

    def execute(self, step: PendingStep) -> RunningStep | None:
        if not step.batch.draft_limits:
            return None
        if self._context.in_flight_writes.is_empty and self._loop.is_repeat(step.batch):
            return self._repeat(step) if step.grant() else None
        return self._execute_prepared(step)

    @torch.inference_mode()
    def _repeat(self, step: PendingStep) -> RunningStep | None:
        """Run the rows of the previous step again."""
        self._context.bind_thread()
        if not self._loop.can_continue:
            self._speculator.begin_step(True, False)  # until then the last step's tokens may not all be counted
            if self._loop.check_over():
                return skipped(step.batch)
        seen = time.perf_counter() - step.begun
        return self._run(step, seen) if self._loop.refresh() else None

    @torch.inference_mode()
    def _execute_prepared(self, step: PendingStep) -> RunningStep | None:
        builder = step.prepare()
        if builder.failed or not self._loop.bind(step.batch):
            return None
        return skipped(step.batch) if self._loop.check_over() else self._run(step, builder.draft)

    def _run(self, step: PendingStep, seen: float) -> RunningStep | None:
        """Run the bound rows. None: state is unchanged. ``seen``: seconds that the observation took."""
        batch, begun, drafting = step.batch, step.begun, time.perf_counter()
        found = self._loop.run(batch)
        if found is None:
            return None
        if found.idle:
            return self._decode.run(step, seen, True) if self._decode.fits(batch) else None
        prepared, ended = found.drafted_at, time.perf_counter()
        timing = StepTiming(
            prepare=prepared - begun,
            run=ended - prepared,
            graph_rows=len(found.accepted) // 4,
            draft=seen + prepared - drafting,
            total=ended - begun,
        )
        result = StepResult(
            batch.number,
            accepted=found.accepted,
            tokens=found.tokens,
            drafted=found.drafted,
            depths=found.depths,
            failed=found.failed,
            timing=timing,
        )
        return RunningStep(lambda: result, True, None if self._loop.can_continue else self._context.idle_work)
