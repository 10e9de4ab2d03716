"""What a draft sees, chains of draft tokens with their verification, and that alone: each one call of the native
library (draft_chains.h, draft_cycle.h)."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.core.arrays import Longs
from kernels.core.attention_rows import TokenTable
from kernels.core.operators import Draws
from kernels.devices.cpu.native.library import Chain, Cycle, CycleOutput, Observation, Op, RowTokens, Table
from kernels.devices.cpu.program import Program
from kernels.devices.prepared import (
    ChainDraftPasses,
    CycleResult,
    DraftCacheSlots,
    DraftCycle,
    ObserveTokens,
    TargetOutput,
    VerifyChains,
)

__all__ = ["cycle", "described", "observe", "verify"]

_IDLE = 4


def described(table: TokenTable) -> Table:
    """The same for the library, for as long as ``table`` is there."""
    return Table(
        table.tokens.ctypes.data,
        table.tokens.shape[1],
        table.known.ctypes.data,
        table.computed.ctypes.data,
        table.page_count.ctypes.data,
        table.targets.ctypes.data,
        table.pages.ctypes.data,
        table.pages.shape[1],
        table.page_size,
        table.stops.ctypes.data,
        table.stops.shape[1],
        table.stops_from.ctypes.data,
    )


def observe(
    program: Program, table: TokenTable, ahead: int, inputs: Tensor, left: Tensor | None, states: Tensor | None
) -> ObserveTokens:
    """See ``NativePass.observe``."""
    native, where, rows = program.native, described(table), RowTokens()
    seen = _observation(ahead, inputs, left, states)
    before = (native.address, program.ops, program.count, ctypes.byref(where), ctypes.byref(rows), ctypes.byref(seen))
    keep_alive = (program, table, where, inputs, left, states)

    def run(slots: Longs, starts: Longs, counts: Longs, features: npt.NDArray[np.int16] | None, places: Longs) -> None:
        assert keep_alive
        rows.rows = len(slots)
        rows.slots, rows.starts, rows.counts = slots.ctypes.data, starts.ctypes.data, counts.ctypes.data
        if features is not None:
            seen.features, seen.stride = features.ctypes.data, features.strides[0] // features.itemsize
            seen.places = places.ctypes.data
        native.library.observe(*before)

    return run


def _observation(ahead: int, inputs: Tensor, left: Tensor | None, states: Tensor | None) -> Observation:
    observation = Observation(ahead=ahead, inputs=inputs.data_ptr(), width=inputs.shape[1])
    if left is not None and states is not None:
        observation.left, observation.states, observation.kept = left.data_ptr(), states.data_ptr(), states.shape[1]
    return observation


class CyclePasses(NamedTuple):
    """The programs of a cycle: the ``target``'s, and those of ``ChainDraftPasses``."""

    target: Program
    observe: Program
    head: Program
    then: Program


def cycle(
    passes: CyclePasses,
    draft: ChainDraftPasses,
    places: DraftCacheSlots,
    table: TokenTable,
    target: TargetOutput,
    features: npt.NDArray[np.int16] | None,
    *,
    max_drafts: int,
    max_length: int,
) -> DraftCycle:
    """See ``NativePass.cycle``."""
    model, observing, head, then = passes
    native, ids, room, token_room = model.native, draft.ids, len(draft.first_input), len(target.argmax)
    vocab = draft.first_logits.logits.shape[1] if ids is None else int(ids.max()) + 1
    chosen, unsound = np.zeros((2, room), dtype=np.int64), np.zeros((2, room), dtype=np.bool_)
    draws: list[Op] = []
    for number, each in enumerate((draft.first_logits, draft.next_logits)):
        op = native.drawing(each.logits, chosen[number], unsound[number])
        op.c, op.i1 = None if ids is None else ids.data_ptr(), vocab
        draws.append(op)
    drawn, unfit = np.zeros(token_room, dtype=np.int64), np.zeros(token_room, dtype=np.bool_)
    draws.append(native.drawing(target.logits, drawn, unfit))
    pointer = ctypes.c_void_p
    chain = Chain(
        (pointer * 2)(ctypes.addressof(head.ops), ctypes.addressof(then.ops)),
        (ctypes.c_int64 * 2)(head.count, then.count),
        (pointer * 2)(draft.first_logits.tokens.data_ptr(), draft.next_logits.tokens.data_ptr()),
        (pointer * 2)(*[ctypes.addressof(op) for op in draws[:2]]),
        None if ids is None else ids.data_ptr(),
        draft.states.data_ptr(),
        draft.first_input.data_ptr(),
        draft.next_input.data_ptr(),
        draft.states.shape[1],
    )
    seen = _observation(draft.ahead, draft.observe_input, draft.observe_output, draft.states)
    if features is not None:
        seen.features, seen.stride = features.ctypes.data, features.strides[0] // features.itemsize
    settings = Cycle(
        chain,
        places.filled.ctypes.data,
        places.offset,
        places.spare_page,
        places.spare_tokens,
        ctypes.addressof(model.ops),
        model.count,
        target.argmax.ctypes.data,
        target.nonfinite.ctypes.data,
        ctypes.addressof(draws[2]),
        max_drafts,
        max_length,
        ctypes.addressof(observing.ops),
        observing.count,
        seen,
        len(draft.observe_input),
    )
    roots, accepted = np.zeros((2, room), dtype=np.int64)
    emitted, drafted, depths = np.zeros((3, room), dtype=np.int32)
    tokens, kept = np.zeros(token_room, dtype=np.int32), np.zeros(token_room, dtype=np.int64)
    ended = np.zeros(room, dtype=np.bool_)
    output = CycleOutput(*[part.ctypes.data for part in (roots, accepted, emitted, drafted, depths, tokens, kept)])
    output.ended = ended.ctypes.data
    where = described(table)
    call = native.library.cycle
    before = (native.address, ctypes.byref(settings), ctypes.byref(where))
    keep_alive: tuple[object, ...]
    keep_alive = (passes, draft, places, table, target, features, chosen, unsound)
    keep_alive += (drawn, unfit, draws, ended)
    into = ctypes.byref(output)
    last, at = np.zeros(0, dtype=np.int64), 0

    def run(
        slots: Longs, drafts: bytes, left: Longs | None, steps: int, how: Draws | None, unseen: bool
    ) -> tuple[CycleResult | None, bool]:
        nonlocal last, at
        assert keep_alive
        rows = len(slots)
        if slots is not last:  # each question for an address takes a microsecond or more
            last, at = slots, slots.ctypes.data
        drawing = None if how is None else how.ctypes.data
        left_address = None if left is None else left.ctypes.data
        code = call(*before, at, rows, drafts, left_address, steps, drawing, unseen, into)
        if code == _IDLE:
            rows = 0
        elif code:
            return None, bool(output.seen)
        counts = accepted[:rows]
        total = int(counts[0]) if rows == 1 else int(counts.sum())
        result = CycleResult(
            roots[:rows],
            counts,
            kept[:total],
            emitted[:rows].tobytes(),
            drafted[:rows].tobytes(),
            depths[:rows].tobytes(),
            tokens[:total].tobytes(),
            output.drafted_at,
            bool(output.over),
        )
        return result, bool(output.seen)

    return run


def verify(program: Program, table: TokenTable, output: TargetOutput) -> VerifyChains:
    """See ``NativePass.verify``."""
    native, where, rows = program.native, described(table), RowTokens()
    count = len(output.argmax)
    drawn, unsound = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.bool_)
    draw = native.drawing(output.logits, drawn, unsound)
    before = (native.address, program.ops, program.count, ctypes.byref(where), ctypes.byref(rows))
    results, drawing = (output.argmax.ctypes.data, output.nonfinite.ctypes.data), ctypes.byref(draw)
    call = native.library.verify
    keep_alive = (program, table, where, output, drawn, unsound)

    def run(slots: Longs, roots: Longs, counts: Longs, tokens: Longs, draws: Draws | None) -> Longs | None:
        assert keep_alive
        accepted = np.empty(len(slots), dtype=np.int64)
        rows.rows = len(slots)
        rows.slots, rows.starts, rows.counts = slots.ctypes.data, roots.ctypes.data, counts.ctypes.data
        if draws is not None:
            draw.b = draws.ctypes.data
        code = call(
            *(*before, tokens.ctypes.data, tokens.shape[1], *results),
            None if draws is None else drawing,
            accepted.ctypes.data,
        )
        return None if code else accepted

    return run
