"""Passes on the host, and loops of decodes: each step in one call of the native library (decode_loop.h)."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.core.attention_rows import DecodeTokens, TokenTable
from kernels.core.operators import Draws, Masks
from kernels.devices.cpu import chains
from kernels.devices.cpu.native.library import Head, RowTokens
from kernels.devices.cpu.program import Program
from kernels.devices.prepared import (
    ChainDraftPasses,
    DecodeCall,
    DraftCacheSlots,
    DraftCycle,
    NativePass,
    ObserveTokens,
    PassLogits,
    PrefillCall,
    TargetOutput,
    VerifyChains,
)

__all__ = ["CpuPass"]

_DONE, _OVER = 0, 3


class CpuPass:
    """See ``NativePass``."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def __call__(self, rows: DecodeTokens) -> None:
        self._program.run_decodes(rows)

    def advance(self, table: TokenTable, output: TargetOutput) -> DecodeCall:
        program, count = self._program, len(output.argmax)
        native, result = program.native, np.zeros(count, dtype=np.int32)
        drawn, unsound = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.bool_)
        draw = native.drawing(output.logits, drawn, unsound)
        described = chains.described(table)
        run = native.library.advance
        before = (native.address, program.ops, program.count, ctypes.byref(described))
        results = (output.argmax.ctypes.data, output.nonfinite.ctypes.data)
        where, drawing = result.ctypes.data, ctypes.byref(draw)
        keep_alive = (program, table, output, drawn, unsound)

        def advance(slots: npt.NDArray[np.int64], draws: Draws | None, masks: Masks | None) -> bytes | None:
            assert keep_alive
            if draws is not None:
                draw.b, draw.i2 = draws.ctypes.data, 0 if masks is None else masks.ctypes.data
            code = run(*before, slots.ctypes.data, len(slots), *results, None if draws is None else drawing, where)
            if code == _DONE:
                return result[: len(slots)].tobytes()
            return b"" if code == _OVER else None

        return advance

    def observe(
        self, table: TokenTable, ahead: int, inputs: Tensor, left: Tensor | None, states: Tensor | None
    ) -> ObserveTokens:
        return chains.observe(self._program, table, ahead, inputs, left, states)

    def cycle(
        self,
        draft: ChainDraftPasses,
        places: DraftCacheSlots,
        table: TokenTable,
        output: TargetOutput,
        features: npt.NDArray[np.int16] | None,
        *,
        max_drafts: int,
        max_length: int,
    ) -> DraftCycle:
        assert isinstance(draft.observe, CpuPass)
        assert isinstance(draft.first_pass, CpuPass)
        assert isinstance(draft.next_pass, CpuPass)
        passes = chains.CyclePasses(
            self._program, draft.observe._program, draft.first_pass._program, draft.next_pass._program
        )
        return chains.cycle(
            passes, draft, places, table, output, features, max_drafts=max_drafts, max_length=max_length
        )

    def verify(self, table: TokenTable, output: TargetOutput) -> VerifyChains:
        return chains.verify(self._program, table, output)

    def prefill(
        self,
        head: NativePass,
        table: TokenTable,
        hidden: Tensor,
        last: Tensor,
        output: PassLogits,
        nonfinite: npt.NDArray[np.bool_],
    ) -> PrefillCall:
        assert isinstance(head, CpuPass)
        model, then = self._program, head._program
        native, room = model.native, len(last)
        where, rows, tokens = chains.described(table), RowTokens(), np.zeros(room, dtype=np.int32)
        drawn, unsound = np.zeros(room, dtype=np.int64), np.zeros(room, dtype=np.bool_)
        draw = native.drawing(output.logits, drawn, unsound)
        ending = Head(
            ctypes.addressof(then.ops), then.count, hidden.data_ptr(), hidden.stride(0), last.data_ptr(), last.shape[1]
        )
        call = native.library.prefill
        before = (native.address, model.ops, model.count, *map(ctypes.byref, (where, rows, ending)))
        results, drawing = (output.tokens.data_ptr(), nonfinite.ctypes.data), ctypes.byref(draw)
        keep_alive = (model, then, table, where, hidden, last, output, nonfinite, drawn, unsound)

        def prefill(
            slots: npt.NDArray[np.int64],
            starts: npt.NDArray[np.int64],
            counts: npt.NDArray[np.int64],
            draws: Draws | None,
            masks: Masks | None,
        ) -> bytes | None:
            assert keep_alive
            rows.rows = len(slots)
            rows.slots, rows.starts, rows.counts = slots.ctypes.data, starts.ctypes.data, counts.ctypes.data
            if draws is not None:
                draw.b, draw.i2 = draws.ctypes.data, 0 if masks is None else masks.ctypes.data
            code = call(*before, *results, None if draws is None else drawing, tokens.ctypes.data)
            return None if code else tokens[: len(slots)].tobytes()

        return prefill
