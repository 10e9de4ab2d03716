"""Decodes in CUDA graphs: one for each number of rows in a list, replayed for up to so many rows.

A graph holds the addresses it was captured with, so what a step brings is copied into tensors that stay where they are.
Rows that a step does not have are filled up: they run the first token of nowhere, write to the dump page and see one
key.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.cuda.attention import AttentionPlan, DecodeRows
from kernels.cuda.decode import split_count

__all__ = ["DecodeGraphs"]

_log = logging.getLogger("troupe.kernels.cuda")


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    hidden: Tensor


class DecodeGraphs:
    """Captures ``forward`` for batches of ``sizes`` rows of one token each, the largest first, in one memory pool.

    All tensors of a batch are views of the leading rows of the same buffers. ``columns``: pages a sequence may have.
    ``padded``: whether a step may use a graph of more rows than it has. ``agree``: whether all ranks of the model could
    do what this one could: a graph that one of them lacks is used by none.
    """

    def __init__(
        self,
        forward: Callable[[ForwardBatch], Tensor],
        windows: Sequence[int],
        sizes: Sequence[int],
        kv_heads: int,
        columns: int,
        page_size: int,
        device: torch.device,
        padded: bool,
        agree: Callable[[bool], bool],
    ) -> None:
        most = max(sizes)
        self._forward, self._windows, self._kv_heads, self._page_size = forward, windows, kv_heads, page_size
        self._device, self._padded, self._agree = device, padded, agree
        self._token_ids = torch.zeros(most, dtype=torch.int32, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._dump = torch.arange(most, dtype=torch.int64, device=device) % page_size
        self._cache_index = self._dump.clone()
        self._state = torch.zeros((most, 1 + columns), dtype=torch.int32, device=device)
        self._nothing = torch.zeros((most, 2), dtype=torch.int32, device=device)
        self._nothing[:, 0] = 1
        self._state[:, :2] = self._nothing
        self._graphs: dict[int, _Graph] = {}
        self._capture(sorted(sizes, reverse=True))
        self.sizes = sorted(self._graphs)

    def run(self, batch: ForwardBatch, plan: AttentionPlan) -> Tensor | None:
        """What ``forward`` gives for the batch, whose rows all decode; None when no graph fits.

        The result is overwritten by the next call.
        """
        assert plan.decodes is not None
        given = plan.decodes.state
        rows = len(given)
        size = next((size for size in self.sizes if size >= rows), 0)
        if not size or (size > rows and not self._padded):
            return None
        self._token_ids[:rows].copy_(batch.token_ids)
        self._positions[:rows].copy_(batch.positions)
        self._cache_index[:rows].copy_(batch.cache_index)
        self._state[:rows, : given.shape[1]].copy_(given)
        if size > rows:
            self._cache_index[rows:size].copy_(self._dump[rows:size])
            self._state[rows:size, :2].copy_(self._nothing[rows:size])
        graph = self._graphs[size]
        graph.graph.replay()
        return graph.hidden[:rows]

    def _batch(self, size: int) -> ForwardBatch:
        context = (self._state.shape[1] - 1) * self._page_size
        decodes = DecodeRows(self._state[:size], split_count(size, self._kv_heads, context))
        return ForwardBatch(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            cache_index=self._cache_index[:size],
            plans={window: AttentionPlan(decodes, None, window) for window in self._windows},
        )

    def _capture(self, sizes: Sequence[int]) -> None:
        """What cannot be captured runs without a graph, and the log says so."""
        if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
            _log.warning("CUDA_LAUNCH_BLOCKING=1 forbids graphs: decodes run without.")
            return
        pool = None
        for size in sizes:
            batch = self._batch(size)
            graph = torch.cuda.CUDAGraph()
            failure: RuntimeError | None = None
            try:
                self._forward(batch)  # kernels are compiled and communicators made at first use: not while capturing
                torch.cuda.synchronize(self._device)
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    hidden = self._forward(batch)
            except RuntimeError as error:
                failure = error
            if not self._agree(failure is None):
                self._explain(size, failure or RuntimeError("another rank could not"))
                return
            pool = pool or graph.pool()
            self._graphs[size] = _Graph(graph, hidden)

    def _explain(self, size: int, error: RuntimeError) -> None:
        first: BaseException = error  # ending a capture that failed fails again: what came before it is the cause
        while first.__context__ is not None:
            first = first.__context__
        cause = str(first).strip().splitlines()[0] if str(first).strip() else type(first).__name__
        left = f"graphs of {sorted(self._graphs)} rows are used" if self._graphs else "all decodes run without a graph"
        hint = "--disable-cuda-graph silences this"
        if isinstance(first, torch.OutOfMemoryError):
            hint = "lower --mem-fraction-static or --cuda-graph-max-bs"
        _log.warning("The decode of %d rows could not be captured into a graph (%s); %s. %s", size, cause, left, hint)
