"""What a draft sees, its chains of guesses, and their verification: each one call of the native library (chains.h)."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.cpu.native.library import Behind, Chain, Observation, Op, RowTokens, Table
from kernels.cpu.program import Program
from kernels.platforms.operators import Draws
from kernels.platforms.prepared import GuessChains, Guessed, ObserveTokens, VerifyChains
from kernels.platforms.rows import TokenTable

__all__ = ["described", "guess", "observe", "verify"]

Longs = npt.NDArray[np.int64]


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
    )


def observe(
    program: Program, table: TokenTable, ahead: int, given: Tensor, left: Tensor | None, states: Tensor | None
) -> ObserveTokens:
    """See ``HostPass.observe``."""
    native, where, rows = program.native, described(table), RowTokens()
    seen = Observation(ahead=ahead, given=given.data_ptr(), width=given.shape[1])
    if left is not None and states is not None:
        seen.left, seen.states, seen.kept = left.data_ptr(), states.data_ptr(), states.shape[1]
    before = (native.address, program.ops, program.count, ctypes.byref(where), ctypes.byref(rows), ctypes.byref(seen))
    held = (program, table, where, given, left, states)

    def run(slots: Longs, starts: Longs, counts: Longs, features: npt.NDArray[np.int16] | None, places: Longs) -> None:
        assert held
        rows.rows = len(slots)
        rows.slots, rows.starts, rows.counts = slots.ctypes.data, starts.ctypes.data, counts.ctypes.data
        if features is not None:
            seen.features, seen.stride = features.ctypes.data, features.strides[0] // features.itemsize
            seen.places = places.ctypes.data
        native.library.observe(*before)

    return run


def guess(
    head: Program,
    then: Program,
    first: Guessed,
    later: Guessed,
    ids: Tensor | None,
    states: Tensor,
    headed: Tensor,
    before: Tensor,
    page_size: int,
) -> GuessChains:
    """See ``HostPass.guess``."""
    native = head.native
    vocab = first.logits.shape[1] if ids is None else int(ids.max()) + 1
    draws: list[Op] = []
    room = len(first.tokens)
    drawn, broken = np.zeros((2, room), dtype=np.int64), np.zeros((2, room), dtype=np.bool_)
    for number, each in enumerate((first, later)):
        op = native.drawing(each.logits, drawn[number], broken[number])
        op.c, op.i1 = None if ids is None else ids.data_ptr(), vocab
        draws.append(op)
    pointer = ctypes.c_void_p
    chain = Chain(
        (pointer * 2)(ctypes.addressof(head.ops), ctypes.addressof(then.ops)),
        (ctypes.c_int64 * 2)(head.count, then.count),
        (pointer * 2)(first.tokens.data_ptr(), later.tokens.data_ptr()),
        stands_for=None if ids is None else ids.data_ptr(),
        states=states.data_ptr(),
        headed=headed.data_ptr(),
        before=before.data_ptr(),
        width=states.shape[1],
    )
    greedy, sampled = (pointer * 2)(), (pointer * 2)(*[ctypes.addressof(op) for op in draws])
    behind = Behind(page_size=page_size)
    call = native.library.guess
    given = (native.address, ctypes.byref(chain), ctypes.byref(behind))
    held = (head, then, first, later, ids, states, headed, before, drawn, broken)

    def run(
        slots: Longs, roots: Longs, starts: Longs, pages: npt.NDArray[np.int32], steps: int, how: Draws | None
    ) -> Longs:
        assert held
        pages = np.ascontiguousarray(pages)
        found = np.empty((steps, len(slots)), dtype=np.int64)
        behind.rows, behind.columns = pages.shape
        behind.slots, behind.roots, behind.starts = slots.ctypes.data, roots.ctypes.data, starts.ctypes.data
        behind.pages = pages.ctypes.data
        chain.draws = greedy if how is None else sampled
        if how is not None:
            for op in draws:
                op.b = how.ctypes.data
        call(*given, steps, found.ctypes.data)
        return found

    return run


def verify(
    program: Program, table: TokenTable, logits: Tensor, likeliest: Longs, broken: npt.NDArray[np.bool_]
) -> VerifyChains:
    """See ``HostPass.verify``."""
    native, where, rows = program.native, described(table), RowTokens()
    drawn, unsound = np.zeros(len(likeliest), dtype=np.int64), np.zeros(len(likeliest), dtype=np.bool_)
    draw = native.drawing(logits, drawn, unsound)
    before = (native.address, program.ops, program.count, ctypes.byref(where), ctypes.byref(rows))
    results, drawing = (likeliest.ctypes.data, broken.ctypes.data), ctypes.byref(draw)
    call = native.library.verify
    held = (program, table, where, logits, likeliest, broken, drawn, unsound)

    def run(slots: Longs, roots: Longs, counts: Longs, tokens: Longs, draws: Draws | None) -> Longs | None:
        assert held
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
