"""A whole forward pass of native operators that were recorded, run in one call.

The number of rows is the step's, so one program serves all steps of up to the rows it was recorded for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.core.attention_rows import AttentionRows, DecodeTokens
from kernels.core.batch import ForwardBatch
from kernels.devices.cpu.native.library import Op, Step
from kernels.devices.cpu.operators import Native
from kernels.devices.cpu.recording import NotNative

__all__ = ["Program", "step_of"]


@dataclass(frozen=True)
class Program:
    """A recorded forward pass. ``out`` [tokens, hidden]: its result, overwritten by the next step. ``latent``: whether
    it attends to latent vectors, which it does not for prompts of more than ``SHORT`` tokens."""

    native: Native
    ops: Any
    count: int
    out: Tensor
    states: Tensor | None
    keep_alive: list[object]
    latent: bool

    @classmethod
    def record(
        cls,
        native: Native,
        forward: Callable[[ForwardBatch], Tensor],
        windows: Sequence[int],
        plan: Callable[[AttentionRows, int], object],
        tokens: int,
        states: Tensor | None,
    ) -> Program | None:
        """``forward`` of up to so many tokens; None where it has something that is no native operator.

        ``plan``: a window's plan of attention. ``states``: where those of a batch are, if it has any.
        """
        zeros = torch.zeros(tokens, dtype=torch.int64)
        pages = np.zeros((tokens, 1), dtype=np.int32)
        nothing = AttentionRows(np.zeros(tokens, np.int64), np.ones(tokens, np.int64), pages, tokens)
        plans = {window: plan(nothing, window) for window in windows}
        try:
            with native.record(tokens) as recording:
                out = forward(ForwardBatch(zeros, zeros, zeros, plans, states))
        except NotNative:
            return None
        ops = recording.ops
        latent = any(map(native.is_latent, ops))
        return cls(native, (Op * len(ops))(*ops), len(ops), out, states, recording.keep_alive, latent)

    def run_decodes(self, rows: DecodeTokens) -> None:
        """Run the recorded operators; their outputs are the results."""
        count, pages = len(rows.lengths), np.ascontiguousarray(rows.pages)
        step = Step(
            len(rows.ids),
            rows.ids.ctypes.data,
            rows.positions.ctypes.data,
            rows.index.ctypes.data,
            pages.ctypes.data,
            pages.shape[1],
            rows.lengths.ctypes.data,
            sequences=count,
            decodes=count if rows.offsets is None else 0,
        )
        if rows.offsets is not None:
            step.offsets = rows.offsets.ctypes.data
        if rows.bits is not None:
            step.bits, step.bits_stride = rows.bits.ctypes.data, rows.bits.shape[1]
        self.native.run(self.ops, self.count, step)

    def run(self, batch: ForwardBatch, rows: AttentionRows) -> Tensor | None:
        count = len(batch.token_ids)
        if count > len(self.out):
            return None
        given = batch.states
        if self.states is not None and given is not None and given.data_ptr() != self.states.data_ptr():
            self.states[:count].copy_(given)
        step, keep_alive = step_of(rows)
        if step.prompts and self.latent:
            return None
        ids = batch.token_ids if batch.token_ids.dtype == torch.int32 else batch.token_ids.to(torch.int32)
        step.rows = count
        step.ids = ids.data_ptr()
        step.positions = batch.positions.data_ptr()
        step.index = batch.cache_index.data_ptr()
        self.native.run(self.ops, self.count, step)
        del keep_alive
        return self.out[:count]


def step_of(rows: AttentionRows) -> tuple[Step, object]:
    """A step's rows for attention, and the objects that must live until it ran."""
    count, lengths = len(rows.starts), rows.starts + rows.counts
    pages = np.ascontiguousarray(rows.pages)
    step = Step(
        count,
        pages=pages.ctypes.data,
        pages_stride=pages.shape[1],
        lengths=lengths.ctypes.data,
        sequences=count,
        decodes=rows.decodes,
        prompts=count - rows.decodes - rows.verifies,
    )
    if count <= rows.decodes:
        return step, (lengths, pages)
    offsets = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(rows.counts, out=offsets[1:])
    step.offsets = offsets.ctypes.data
    tree, roots = rows.tree, rows.roots
    if tree is not None:
        tree = tree if tree.stride(1) == 1 else tree.contiguous()
        step.bits, step.bits_stride = tree.data_ptr(), tree.stride(0)
        if roots is not None:
            roots = np.ascontiguousarray(roots)
            step.roots = roots.ctypes.data
    return step, (lengths, pages, offsets, tree, roots)
