"""Launches verifying passes before the host knows the accepted tokens of the passes before them."""

from __future__ import annotations

import time

import torch

from kernels.contract.runner import RunningStep
from kernels.execution.pending_step import PendingStep, StepContext
from kernels.speculation.early_draft import OverlappedVerify

__all__ = ["OverlappedVerifyPass"]


class OverlappedVerifyPass:
    """Takes steps of rows that verified in the step before. ``following``: issues a pass after one whose outcome the
    host does not know, and then waits for that outcome."""

    def __init__(self, context: StepContext, following: OverlappedVerify) -> None:
        self._outputs, self._following = context.loaded.outputs, following

    def execute(self, step: PendingStep) -> RunningStep | None:
        return self._issue(step) if self._following.is_candidate(step.batch) else None

    @torch.inference_mode()
    def _issue(self, step: PendingStep) -> RunningStep | None:
        builder = step.update()
        followed = None if builder.failed else self._following.issue(step.batch)
        if followed is None:
            return None
        started = time.perf_counter()
        step.rows = self._following.finish_previous(followed)
        # Not earlier: this step writes to no page that the previous step has filled.
        step.begin(started)
        builder.graph_rows = len(step.rows.slots)
        self._outputs.followed(step.rows, followed, builder)
        return step.complete()
