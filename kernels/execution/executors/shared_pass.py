"""Runs steps of data-parallel attention, in which every rank takes part in every pass."""

from __future__ import annotations

import torch

from kernels.contract.runner import RunningStep
from kernels.distributed.shared_experts import SharedExperts
from kernels.execution.executors.eager_pass import EagerPass
from kernels.execution.pending_step import PendingStep, StepContext

__all__ = ["SharedPass"]


class SharedPass:
    """Takes every step. One without a row that can run still joins the others in the layers of experts."""

    def __init__(self, context: StepContext, shared: SharedExperts) -> None:
        self._eager = EagerPass(context)
        self._shared = shared

    @torch.inference_mode()
    def execute(self, step: PendingStep) -> RunningStep | None:
        rows, tokens = step.form(), step.batch.pass_tokens
        if not tokens:
            raise ValueError("a step of data-parallel attention must say the tokens of every part")
        self._shared.enter(tokens)
        if rows is not None:
            return self._eager.execute(step)
        self._shared.run_empty()
        return step.complete()
