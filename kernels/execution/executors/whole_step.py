"""Runs decodes and prompts in a graph that reads its tokens from the device's table and samples the argmax."""

from __future__ import annotations

import torch

from kernels.contract.runner import RunningStep
from kernels.core.attention_rows import PromptTokens, StepTokens
from kernels.devices.prepared import CapturedStepResult, CapturedSteps
from kernels.execution.pending_step import PendingStep, StepContext

__all__ = ["WholeStep"]


class WholeStep:
    """Takes steps that fit one of the captured ``steps``."""

    def __init__(self, context: StepContext, steps: CapturedSteps) -> None:
        self._slots, self._outputs, self._steps = context.loaded.slots, context.loaded.outputs, steps

    @torch.inference_mode()
    def execute(self, step: PendingStep) -> RunningStep | None:
        rows = step.form()
        if rows is None:
            return None
        steps, pages = self._steps, step.writes.pages
        ends = rows.starts + rows.counts
        grows = ends == self._slots.known[rows.slots]
        bounded = tuple(table.rows(rows.slots, rows.starts, rows.counts) for table in self._slots.bounded)
        result: CapturedStepResult | None = None
        plain = self._outputs.is_all_greedy(rows, grows)
        if rows.decodes == len(rows.slots):
            draws = self._outputs.draws(rows, grows) if steps.draws and not plain else None
            result = steps.run(StepTokens(rows.slots, ends, grows, pages, bounded, draws))
        elif steps.prompts is not None and not self._outputs.needs_all_tokens(rows):
            result = steps.prompts(
                PromptTokens(rows.slots, rows.starts, rows.counts, grows, pages, rows.decodes, bounded)
            )
        if result is None:
            return None
        step.begin()
        builder = step.prepare()
        builder.graph_rows = len(rows.slots)
        if plain or result.drawn:
            self._outputs.commit(rows, grows, result, builder)
        else:
            self._outputs.read_step(rows, result, builder)
        return step.complete()
