"""Runs any step eagerly, operator by operator."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.contract.runner import RunningStep
from kernels.core.batch import ForwardBatch
from kernels.devices.prepared import PassResult
from kernels.execution.pending_step import PendingStep, StepContext
from kernels.state.step_rows import StepRows

__all__ = ["EagerPass"]


class EagerPass:
    """Takes every step that has rows."""

    def __init__(self, context: StepContext) -> None:
        self._loaded = context.loaded

    @torch.inference_mode()
    def execute(self, step: PendingStep) -> RunningStep | None:
        rows = step.form()
        if rows is None:
            return None
        batch, loaded = step.forward_batch(), self._loaded
        step.begin()
        adapters = loaded.model.rows
        if adapters is None:
            return self._run(step, rows, batch)
        adapters.idle = not adapters.used
        try:
            return self._run(step, rows, batch)
        finally:
            adapters.idle = False

    def _run(self, step: PendingStep, rows: StepRows, batch: ForwardBatch) -> RunningStep:
        loaded = self._loaded
        recorded = step.batch.record_experts if loaded.info.experts[1] else ""
        rebalancer = loaded.rebalancer
        counting = rebalancer is not None and rebalancer.counting
        if recorded or counting or loaded.slots.returns_experts:
            result, experts = loaded.model.forward_routed(batch, loaded.caches)
            if rebalancer is not None and counting:
                rebalancer.add(loaded.model.count_experts(experts))
            found = PassResult(result, batch.cache_index, experts=experts, recorded=recorded, states=batch.verifying)
            return step.complete_pass(found)
        result = loaded.model.forward(batch, loaded.caches, wanted=self._last_tokens(rows))
        return step.complete_pass(PassResult(result, batch.cache_index, states=batch.verifying))

    def _last_tokens(self, rows: StepRows) -> Tensor | None:
        """Indices of the rows' last tokens in the batch, if the results of all other tokens are unused; else None."""
        loaded = self._loaded
        if loaded.shared is not None:  # the other ranks expect all rows in the last layer, too
            return None
        if loaded.speculator is not None or rows.decodes == len(rows.slots) or loaded.outputs.needs_all_tokens(rows):
            return None
        return loaded.device.memory.put(rows.last)
