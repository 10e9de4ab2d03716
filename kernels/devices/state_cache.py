"""States of recurrent layers in plain torch, for devices without a kernel for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.contract.caches import State
from kernels.core.batch import BoundedRows

__all__ = ["Advance", "StateCache", "advance_states", "make_states"]

StateCache = list[Tensor]
"""One layer's: for each of the spec's shapes a tensor [pages, *shape]."""

Advance = Callable[[slice, list[Tensor]], list[Tensor]]
"""Run these tokens of the step, which follow one another in a sequence, on from these states -> the states after."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def make_states(spec: State, pages: int, device: torch.device) -> StateCache:
    """One layer's states, zeroed."""
    dtype = _DTYPES[spec.dtype]
    return [torch.zeros(pages, *shape, dtype=dtype, device=device) for shape in spec.shapes]


def advance_states(cache: StateCache, rows: BoundedRows, advance: Advance) -> None:
    """Run every row of a step on from its state, and write the states where the next steps, and other sequences with
    the same prefix, find them.

    A row's tokens are cut at the borders of its columns: each column's page gets the state after the column's last
    token, or after the row's. A full column's page is never written again: it is a snapshot.
    """
    size, offset = rows.page_tokens, 0
    for row, (start, count) in enumerate(zip(rows.starts.tolist(), rows.counts.tolist(), strict=True)):
        pages = rows.pages[row].tolist()
        if start:
            states = [kept[pages[(start - 1) // size]] for kept in cache]
        else:
            states = [torch.zeros_like(kept[0]) for kept in cache]
        position, end = start, start + count
        while position < end:
            border = min((position // size + 1) * size, end)
            tokens = slice(offset + position - start, offset + border - start)
            states = advance(tokens, states)
            for kept, state in zip(cache, states, strict=True):
                kept[pages[position // size]] = state
            position = border
        offset += count
