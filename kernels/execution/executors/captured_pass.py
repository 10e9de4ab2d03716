"""Runs the model's part of a step in a captured graph; drafting, sampling and verification run around it."""

from __future__ import annotations

import torch

from kernels.contract.runner import RunningStep
from kernels.core.layer_context import LayerContext
from kernels.devices.prepared import CapturedPasses, PassResult
from kernels.execution.pending_step import PendingStep

__all__ = ["CapturedPass"]


class CapturedPass:
    """Takes steps that fit a captured pass. ``decodes``: passes of rows without draft tokens. ``verifies``: passes with
    rows that verify. Either may be missing. ``skipped``: adapters that the passes were captured without; steps in which
    a slot has one are not taken."""

    def __init__(
        self, decodes: CapturedPasses | None, verifies: CapturedPasses | None, skipped: LayerContext | None = None
    ) -> None:
        self._decodes, self._verifies, self._skipped = decodes, verifies, skipped

    @torch.inference_mode()
    def execute(self, step: PendingStep) -> RunningStep | None:
        rows = step.form()
        if rows is None or (self._skipped is not None and self._skipped.used):
            return None
        captured = self._verifies if rows.verifies else self._decodes
        prompts = rows.counts[rows.decodes + rows.verifies :]
        if captured is None or (len(prompts) and prompts.max() > captured.prompts):
            return None
        batch = step.receive(captured.states)
        step.begin()
        result = captured.run(batch)
        if result is None:
            return None
        step.send(result)
        step.prepare().graph_rows = len(rows.slots)
        return step.complete_pass(PassResult(result, batch.cache_index, states=batch.verifying))
