"""States of recurrent layers in plain torch, for devices without a kernel for them.

A step's tokens are cut into segments at the borders of the state's pages: each page gets the state after its last
token, or after the row's. A full page is never written again: it is a snapshot, from which sequences with the same
prefix go on. Segments that do not depend on one another run in one call, if not too much of it is padding: all decodes
do, and prompts of similar lengths.

Rows that verify draft tokens write no state, as it would be that of tokens which may be rejected. When the accepted
tokens are known, the layers run them a second time from the state before the step, page by page (``run_accepted``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.contract.caches import State
from kernels.core.batch import BoundedRows, StateSegments

__all__ = [
    "Advance",
    "StateCache",
    "advance_states",
    "captured_segments",
    "make_states",
    "pages_before",
    "plan_segments",
    "run_accepted",
    "run_accepted_null",
    "states_before",
    "verify_segments",
]

StateCache = list[Tensor]
"""One layer's: for each of the spec's shapes a tensor [pages, *shape]."""

Advance = Callable[[StateSegments, list[Tensor]], list[Tensor]]
"""``(segment, states)`` -> the states after: run the segment's tokens on from states [n, *shape]. It may overwrite the
states, and padding must leave them as they are."""

Put = Callable[[npt.NDArray[np.int64]], Tensor]
"""Copies to the device."""

_PADDED = 1.5
"""Most tokens of a call of several rows, by those that are no padding."""
_CALL_TOKENS = 2048
"""The same in all: operators of longer ones are no longer small, so that calls cost nothing."""
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
    offsets: npt.NDArray[np.int64] | None = None,
    *,
    few: bool = False,
) -> tuple[StateSegments, ...]:
    """The segments of a step, in the order in which they run. Arguments as in ``BoundedRows``; ``offsets`` int64
    [rows]: the place of each row's first token, if the rows do not follow one another. ``few``: as in
    ``StateSegments``; such rows run in one call, whatever their lengths."""
    rows = np.arange(len(starts))
    if offsets is None:
        offsets = np.cumsum(counts) - counts
    result = []
    left, at = counts, starts  # of each row: tokens to run, the position of the next
    while len(rows):
        here = np.minimum(left, page_tokens - at % page_tokens)
        for chosen in [np.arange(len(here))] if few else _calls(here):
            some, begin, lengths = rows[chosen], at[chosen], here[chosen]
            first = offsets[some] + begin - starts[some]
            last = lengths[:, None] - 1
            before = pages[some, np.maximum(begin - 1, 0) // page_tokens].astype(np.int64)
            fresh = begin == 0
            result.append(
                StateSegments(
                    put(first[:, None] + np.minimum(np.arange(int(lengths.max())), last)),
                    put(np.where(fresh, 0, before)),
                    put(pages[some, begin // page_tokens].astype(np.int64)),
                    bool(fresh.any()),
                    put(lengths) if lengths.min() < lengths.max() or (few and lengths.max() > 1) else None,
                    few,
                )
            )
        more = left > here
        rows, left, at = rows[more], (left - here)[more], (at + here)[more]
    return tuple(result)


def _calls(lengths: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """The rows of each call, for rows of these ``lengths``. Rows of one token run by themselves: a device has kernels
    for them."""
    result = [ones] if len(ones := np.flatnonzero(lengths == 1)) else []
    order = np.argsort(-lengths, kind="stable")[: len(lengths) - len(ones)]
    begin, tokens = 0, 0  # of the call that is being filled, with its longest row first
    for end, length in enumerate(lengths[order].tolist()):
        padded = (end + 1 - begin) * int(lengths[order[begin]])
        if end > begin and padded > min(_CALL_TOKENS, _PADDED * (tokens + length)):
            result.append(np.sort(order[begin:end]))
            begin, tokens = end, 0
        tokens += length
    if begin < len(order):
        result.append(np.sort(order[begin:]))
    return result


def captured_segments(pages: Tensor, positions: Tensor, page_tokens: int) -> tuple[StateSegments, ...]:
    """The segments of decodes in a captured pass, from what the device knows: ``pages`` int32 [rows, columns] as in
    ``BoundedRows``, ``positions`` int64 [rows] of the tokens. Padding rows, whose pages are the null page, begin."""
    rows, columns = torch.arange(len(positions), device=positions.device), pages.shape[1]
    now = positions.div(page_tokens, rounding_mode="floor").clamp_(max=columns - 1)
    before = (positions - 1).clamp_(min=0).div(page_tokens, rounding_mode="floor").clamp_(max=columns - 1)
    targets, sources = (pages.gather(1, column.unsqueeze(1)).squeeze(1).long() for column in (now, before))
    return (StateSegments(rows.unsqueeze(1), sources * (positions > 0), targets, fresh=True),)


def verify_segments(
    starts: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    pages: npt.NDArray[np.int32],
    page_tokens: int,
    put: Put,
    first: int,
) -> tuple[StateSegments, ...]:
    """The segment of rows that verify draft tokens: whole rows, as no state is written. ``first``: the place of their
    first token; other arguments as in ``plan_segments``."""
    offsets, fresh = first + np.cumsum(counts) - counts, bool((starts == 0).any())
    tokens = offsets[:, None] + np.minimum(np.arange(int(counts.max())), counts[:, None] - 1)
    sources = put(pages_before(starts, pages, page_tokens))
    return (StateSegments(put(tokens), sources, None, fresh, put(counts), few=True),)


def pages_before(
    starts: npt.NDArray[np.int64], pages: npt.NDArray[np.int32], page_tokens: int
) -> npt.NDArray[np.int64]:
    """The pages of the states before rows that begin at ``starts`` int64 [rows], int64 [rows]; the null page of a row
    without one. ``pages`` as in ``BoundedRows``."""
    before = pages[np.arange(len(starts)), np.maximum(starts - 1, 0) // page_tokens].astype(np.int64)
    return np.where(starts == 0, 0, before)


def run_accepted(rows: BoundedRows, accepted: npt.NDArray[np.int64], put: Put) -> None:
    """Bring the states of the rows that verified behind their accepted tokens. ``accepted`` int64 [rows]: how many of a
    row's tokens count; 0: the row has ended, and its states are left as they are."""
    verifying = rows.verifying
    if verifying is None:
        return
    if not verifying.runs:
        raise RuntimeError("layers with states ran draft tokens past BoundedRows.run: their states would be lost")
    part = verifying.rows
    starts, counts, pages, accepted = rows.starts[part], rows.counts[part], rows.pages[part], accepted[part]
    offsets = np.arange(len(counts)) * verifying.stride if verifying.stride else np.cumsum(counts) - counts
    alive = np.flatnonzero(accepted)
    given = starts[alive], accepted[alive], pages[alive], rows.page_tokens, put, offsets[alive]
    segments = plan_segments(*given, few=True)
    for run, inputs in verifying.runs:
        run(inputs, segments)
    verifying.runs.clear()


def run_accepted_null(rows: BoundedRows, put: Put) -> None:
    """``run_accepted`` for two accepted tokens of a row without pages: kernels have a form for it that no step has."""
    verifying = rows.verifying
    if verifying is None:
        return
    one, two = np.ones(1, dtype=np.int64), np.full(1, 2)
    segments = plan_segments(one - 1, two, np.zeros((1, 1), dtype=np.int32), 2, put, few=True)
    for run, inputs in verifying.runs:
        run(inputs, segments)


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
    rows = max(1, _CALL_BYTES // max(1, sum(kept[0].nbytes for kept in cache)))
    for whole in segments:
        if step is not None and step(whole):
            continue
        for segment in _blocks(whole, rows):
            states = advance(segment, states_before(cache, segment))
            if segment.targets is None:
                continue
            for kept, state in zip(cache, states, strict=True):
                kept.index_copy_(0, segment.targets, state.to(kept.dtype))


def _blocks(segment: StateSegments, rows: int) -> Iterator[StateSegments]:
    """Parts of at most ``rows`` rows. No row reads a page that another one writes."""
    for begin in range(0, len(segment.sources), rows):
        yield segment.part(begin, begin + rows)
