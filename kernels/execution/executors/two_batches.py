"""Runs a step as two micro-batches in turns: one computes during the all-reduce of the other."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels.contract.config import TWO_BATCH_TOKENS
from kernels.contract.runner import RunningStep
from kernels.core.arrays import unpack_ints
from kernels.core.batch import ForwardBatch
from kernels.devices.prepared import PassResult
from kernels.distributed.turns import TurnTaker
from kernels.execution.pending_step import PendingStep, StepContext

__all__ = ["TwoBatches"]

_MIN_TOKENS = TWO_BATCH_TOKENS


class TwoBatches:
    """Takes steps that have prompt chunks, at least ``_MIN_TOKENS`` tokens and no draft tokens.

    All compute runs in the order of one stream, so the second part of a row reads the keys that the first one wrote.
    threshold: see ``AttentionRows.divided``.
    """

    def __init__(self, context: StepContext, threshold: float) -> None:
        self._loaded, self._threshold = context.loaded, threshold
        self._turns = TurnTaker(context.loaded.device.bind_thread)

    @torch.inference_mode()
    def execute(self, step: PendingStep) -> RunningStep | None:
        counts = unpack_ints(step.batch.counts)
        if counts.sum() < _MIN_TOKENS or counts.max() == 1:  # before rows are formed: an executor may draft by itself
            return None
        rows, loaded = step.form(), self._loaded
        if rows is None or rows.verifies or rows.decodes == len(rows.slots) or rows.counts.sum() < _MIN_TOKENS:
            return None
        parts = step.divided_batches(self._threshold)
        if parts is None:
            return None
        (before, _), (after, _) = parts
        all_tokens = loaded.speculator is not None or loaded.outputs.needs_all_tokens(rows)
        step.begin()
        first, second = self._turns.run(
            partial(self._forward, before, all_tokens), partial(self._forward, after, all_tokens)
        )
        if not all_tokens and parts[0][1][-1] == parts[1][1][0]:
            first = first[:-1]  # the last token of the row that was cut is in its second part
        step.prepare().divided = True
        index = torch.cat((before.cache_index, after.cache_index))
        return step.complete_pass(PassResult(torch.cat((first, second)), index))

    def _forward(self, batch: ForwardBatch, all_tokens: bool) -> Tensor:
        loaded, wanted = self._loaded, None
        if not all_tokens:
            assert batch.rows is not None
            wanted = loaded.device.memory.put(batch.rows.counts.cumsum() - 1)
        return loaded.model.forward(batch, loaded.caches, wanted=wanted)
