"""States of recurrent layers in plain torch, for devices without a kernel for them.

A step's tokens are cut into segments at the borders of the state's pages: each page gets the state after its last
token, or after the row's. A full page is never written again: it is a snapshot, from which sequences with the same
prefix go on. Segments of the same length that do not depend on one another run in one call: all decodes do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.contract.caches import State
from kernels.core.batch import StateSegments

__all__ = [
    "Advance",
    "StateCache",
    "advance_states",
    "captured_segments",
    "make_states",
    "plan_segments",
    "states_before",
]

StateCache = list[Tensor]
"""One layer's: for each of the spec's shapes a tensor [pages, *shape]."""

Advance = Callable[[Tensor, list[Tensor]], list[Tensor]]
"""``(tokens, states)`` -> the states after: run the tokens int64 [n, count] of the step, of each row ``count`` that
follow one another, on from states [n, *shape]. It may overwrite the states."""

Put = Callable[[npt.NDArray[np.int64]], Tensor]
"""Copies to the device."""

_CALL_BYTES = 1 << 28
"""Of the states of a call: what it allocates beside them is some times as much."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def make_states(spec: State, pages: int, device: torch.device) -> StateCache:
    """One layer's states, zeroed."""
    dtype = _DTYPES[spec.dtype]
    return [torch.zeros(pages, *shape, dtype=dtype, device=device) for shape in spec.shapes]


def plan_segments(
    starts: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    pages: npt.NDArray[np.int32],
    page_tokens: int,
    put: Put,
) -> tuple[StateSegments, ...]:
    """The segments of a step, in the order in which they run. Arguments as in ``BoundedRows``."""
    rows, offsets = np.arange(len(starts)), np.cumsum(counts) - counts
    result = []
    left, at = counts, starts  # of each row: tokens to run, the position of the next
    while len(rows):
        here = np.minimum(left, page_tokens - at % page_tokens)
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, length in enumerate(here.tolist()):
            by_length[length].append(index)
        for length, chosen in by_length.items():
            some, begin = rows[chosen], at[chosen]
            first = offsets[some] + begin - starts[some]
            before = pages[some, np.maximum(begin - 1, 0) // page_tokens].astype(np.int64)
            fresh = begin == 0
            result.append(
                StateSegments(
                    put(first[:, None] + np.arange(length)),
                    put(np.where(fresh, 0, before)),
                    put(pages[some, begin // page_tokens].astype(np.int64)),
                    bool(fresh.any()),
                )
            )
        more = left > here
        rows, left, at = rows[more], (left - here)[more], (at + here)[more]
    return tuple(result)


def captured_segments(pages: Tensor, positions: Tensor, page_tokens: int) -> tuple[StateSegments, ...]:
    """The segments of decodes in a captured pass, from what the device knows: ``pages`` int32 [rows, columns] as in
    ``BoundedRows``, ``positions`` int64 [rows] of the tokens. Padding rows, whose pages are the null page, begin."""
    rows, columns = torch.arange(len(positions), device=positions.device), pages.shape[1]
    now = positions.div(page_tokens, rounding_mode="floor").clamp_(max=columns - 1)
    before = (positions - 1).clamp_(min=0).div(page_tokens, rounding_mode="floor").clamp_(max=columns - 1)
    targets, sources = (pages.gather(1, column.unsqueeze(1)).squeeze(1).long() for column in (now, before))
    return (StateSegments(rows.unsqueeze(1), sources * (positions > 0), targets, fresh=True),)


def states_before(cache: StateCache, segment: StateSegments) -> list[Tensor]:
    """Copies of the states before a segment, [n, *shape] each."""
    states = [kept.index_select(0, segment.sources) for kept in cache]
    if segment.fresh:
        begins = segment.sources == 0
        for state in states:
            state.masked_fill_(begins.view(-1, *(1,) * (state.ndim - 1)), 0)
    return states


def advance_states(
    cache: StateCache,
    segments: tuple[StateSegments, ...],
    advance: Advance,
    step: Callable[[StateSegments], bool] | None = None,
) -> None:
    """Run every row of a step on from its state, and write the states where the next steps, and other sequences with
    the same prefix, find them. ``step``: tries a kernel first, which reads and writes ``cache`` itself; False: nothing
    has run."""
    rows = max(1, _CALL_BYTES // sum(kept[0].nbytes for kept in cache))
    for whole in segments:
        if step is not None and step(whole):
            continue
        for segment in _blocks(whole, rows):
            states = advance(segment.tokens, states_before(cache, segment))
            for kept, state in zip(cache, states, strict=True):
                kept.index_copy_(0, segment.targets, state.to(kept.dtype))


def _blocks(segment: StateSegments, rows: int) -> Iterator[StateSegments]:
    """Parts of at most ``rows`` rows. No row reads a page that another one writes."""
    for begin in range(0, len(segment.sources), rows):
        part = slice(begin, begin + rows)
        yield StateSegments(segment.tokens[part], segment.sources[part], segment.targets[part], segment.fresh)
