"""Runs rows that all verify a whole draft tree, in a graph that reads trees and pages directly, without a batch."""

from __future__ import annotations

import time

import torch

from kernels.contract.runner import RunningStep
from kernels.devices.prepared import CapturedPasses, VerifyCall
from kernels.execution.pending_step import PendingStep, StepContext

__all__ = ["VerifyPass"]


class VerifyPass:
    """Takes steps in which every row verifies a whole tree. ``verify``: ``CapturedPasses.verify`` of the captured
    ``decodes``."""

    def __init__(self, context: StepContext, decodes: CapturedPasses, verify: VerifyCall) -> None:
        assert context.loaded.speculator is not None
        self._slots, self._speculator = context.loaded.slots, context.loaded.speculator
        self._accepts, self._verify = bool(decodes.accept_outputs), verify

    @torch.inference_mode()
    def execute(self, step: PendingStep) -> RunningStep | None:
        rows = step.form()
        drafts = None if rows is None else rows.drafts
        if rows is None or drafts is None or rows.verifies < len(rows.rows):
            return None
        if (rows.counts < drafts.tree.tokens.shape[1]).any():
            return None
        slots, pages, started = None, step.writes.pages, time.perf_counter()
        if self._accepts and self._speculator.early_drafts.can_accept(rows.slots):
            # Drafting after the pass may write to pages that the pass itself does not touch.
            last = (int(rows.starts.max()) + self._speculator.drafter.early_positions()) // self._slots.page_size
            slots, pages = rows.slots, self._slots.pages[rows.slots, : max(pages.shape[1], last + 1)]
        result = self._verify(rows.starts, pages, drafts.tree, slots)
        if result is None:
            return None
        step.begin(started)
        step.prepare().graph_rows = len(rows.slots)
        return step.complete_pass(result)
