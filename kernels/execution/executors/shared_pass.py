"""Runs steps of data-parallel attention, in which every rank takes part in every pass."""

from __future__ import annotations

import torch

from kernels.contract.runner import RunningStep
from kernels.distributed.draft_experts import DraftExperts
from kernels.distributed.shared_experts import SharedExperts
from kernels.execution.executors.captured_pass import CapturedPass
from kernels.execution.executors.eager_pass import EagerPass
from kernels.execution.pending_step import PendingStep, StepContext

__all__ = ["SharedPass"]


class SharedPass:
    """Takes every step. One without a row that can run still joins the others in the layers of experts, also in those
    of a draft (``drafts``). ``captured``: passes of ``SharedExperts.sizes``."""

    def __init__(
        self,
        context: StepContext,
        shared: SharedExperts,
        drafts: DraftExperts | None = None,
        captured: CapturedPass | None = None,
    ) -> None:
        self._captured = captured
        self._eager = EagerPass(context)
        self._shared, self._drafts = shared, drafts

    @torch.inference_mode()
    def execute(self, step: PendingStep) -> RunningStep | None:
        rows, tokens = step.form(), step.batch.pass_tokens
        if not tokens:
            raise ValueError("a step of data-parallel attention must say the tokens of every part")
        if self._drafts is not None:
            self._drafts.finish()
        self._shared.enter(tokens)
        if rows is not None:
            running = None if self._captured is None or not self._shared.size else self._captured.execute(step)
            return self._eager.execute(step) if running is None else running
        self._shared.run_empty()
        return step.complete()
