"""The part of decode graphs that does not depend on the device: sizes, and the tensors that a graph reads.

A graph holds the addresses that it was captured with. A step's tokens are therefore copied into tensors that stay where
they are. Rows and tokens that a step lacks are padding: they run token 0 and write to the null page.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.core.attention_rows import AttentionRows
from kernels.core.batch import ForwardBatch

__all__ = ["GraphBuffers", "Put", "cause_of", "first_error", "graph_sizes", "padded_places", "without_collections"]

Put = Callable[[npt.NDArray[Any]], Tensor]
"""Copies an array to the device."""


def graph_sizes(requested: Sequence[int], largest: int, max_rows: int) -> list[int]:
    """The rows of each graph, ascending. ``requested``: a list of sizes; empty for 1, 2, 4 and the multiples of 8 up to
    ``largest``, then of 16 above 64. None is larger than what ``max_rows`` rows need.
    """
    sizes = requested or [
        size for size in (1, 2, 4, *range(8, 65, 8), *range(80, largest + 1, 16), largest) if size <= largest
    ]
    enough = min((size for size in sizes if size >= max_rows), default=max(sizes, default=0))
    return sorted({size for size in sizes if 0 < size <= enough})


class GraphBuffers:
    """Tensors for up to ``rows`` rows of ``tokens`` tokens each; graphs of fewer rows read the leading ones.

    ``states`` [any, width]: like those of the batches, if these have any. ``null_slots`` int64 [rows * tokens]: slots
    of the null page, for padding.
    """

    def __init__(self, rows: int, tokens: int, page_size: int, device: torch.device, states: Tensor | None) -> None:
        largest = rows * tokens
        self.tokens = tokens
        self.token_ids = torch.zeros(largest, dtype=torch.int32, device=device)
        self.positions = torch.zeros(largest, dtype=torch.int64, device=device)
        self.null_slots = torch.arange(largest, dtype=torch.int64, device=device) % page_size
        self.cache_index = self.null_slots.clone()
        self.states = None if states is None else states.new_zeros(largest, states.shape[1])

    def batch(self, rows: int, plans: Mapping[int, object]) -> ForwardBatch:
        """The batch that a graph of ``rows`` rows is captured with."""
        tokens = rows * self.tokens
        return ForwardBatch(
            token_ids=self.token_ids[:tokens],
            positions=self.positions[:tokens],
            cache_index=self.cache_index[:tokens],
            plans=plans,
            states=None if self.states is None else self.states[:tokens],
        )

    def places(self, rows: AttentionRows, put: Put) -> Tensor | None:
        """Where a step's tokens go, int64 [tokens]; None if each row has all of its tokens."""
        if int(rows.counts.sum()) == len(rows.counts) * self.tokens:
            return None
        return put(padded_places(rows.counts, self.tokens))

    def fill(self, batch: ForwardBatch, places: Tensor | None, end: int) -> None:
        """Copy the tokens of ``batch`` to ``places``, or to the beginning. ``end``: the tokens that the graph reads; of
        padding the states are zeros. Those of the batch may already be where ``states`` is."""
        states = batch.states
        if self.states is not None and states is not None and len(states) < end:
            if places is None:
                self.states[len(states) : end].zero_()
            else:
                if states.data_ptr() == self.states.data_ptr():
                    batch = replace(batch, states=states.clone())
                self.states[:end].zero_()
        for held, new in (
            (self.token_ids, batch.token_ids),
            (self.positions, batch.positions),
            (self.cache_index, batch.cache_index),
            (self.states, batch.states),
        ):
            if held is None or new is None or held.data_ptr() == new.data_ptr():
                continue
            if places is None:
                held[: len(new)].copy_(new)
            else:
                held.index_copy_(0, places, new.to(held.dtype))


def padded_places(counts: npt.NDArray[np.int64], tokens: int) -> npt.NDArray[np.int64]:
    """Places of rows' tokens, ``counts`` of each, in rows that all have room for ``tokens``."""
    first = np.repeat(np.arange(len(counts)) * tokens - (np.cumsum(counts) - counts), counts)
    return first + np.arange(len(first))


def first_error(error: BaseException) -> BaseException:
    """The error that came first: ending a capture that failed fails again."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def cause_of(error: BaseException) -> str:
    """The first line of the error that came first, for the log."""
    first = first_error(error)
    text = str(first).strip()
    return text.splitlines()[0] if text else type(first).__name__


@contextmanager
def without_collections() -> Iterator[None]:
    """Within, the interpreter collects no cycles. One may hold a graph, of a model that is gone: destroying it during a
    capture makes the capture fail ("operation not permitted when stream is capturing")."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
