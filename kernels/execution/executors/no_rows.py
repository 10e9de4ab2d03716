"""Completes steps without a row that can run: they admit, grant and release, or all their rows fail."""

from __future__ import annotations

from kernels.contract.runner import RunningStep
from kernels.execution.pending_step import PendingStep

__all__ = ["NoRows"]


class NoRows:
    """Takes steps without rows; it launches nothing."""

    def execute(self, step: PendingStep) -> RunningStep | None:
        return step.complete() if step.form() is None else None
