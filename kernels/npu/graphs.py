"""Decodes in captured graphs: one for each number of rows in a list, replayed for up to so many rows.

A graph holds addresses and everything that was on the host when it was captured. What a step brings is therefore copied
into tensors that stay where they are, and the lengths of the sequences, which attention reads on the host to plan its
work, are fed to every attention call of the graph before it is replayed. Rows that a step does not have are filled up:
they run the first token of nowhere, write to the dump page and see one key.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from kernels.batch import ForwardBatch
from kernels.npu.attention import FusedPart
from kernels.npu.errors import first_code

__all__ = ["DecodeGraphs"]

_log = logging.getLogger("troupe.kernels.npu")

_OUT_OF_STREAMS = (207005, 207007, 207008)

Forward = Callable[[ForwardBatch], Tensor]
"""``[tokens, hidden]`` of a batch."""

Plans = Callable[[FusedPart], object]
"""The attention plan of a step that is this one call."""


@dataclass(frozen=True)
class _Graph:
    graph: torch.npu.NPUGraph
    hidden: Tensor


class DecodeGraphs:
    """Captures ``forward`` for batches of ``sizes`` rows of one token each, the largest first, in one memory pool.

    All tensors of a batch are views of the leading rows of the same buffers. ``columns``: pages a sequence may have.
    ``page_size``: rows that are filled up have a slot of the dump page each, so at most so many can be.
    ``padded``: whether a step may use a graph of more rows than it has. ``agree``: whether all ranks of the model could
    do what this one could: a graph that one of them lacks is used by none.
    """

    def __init__(
        self,
        forward: Forward,
        windows: Iterable[int],
        plan: Plans,
        sizes: Sequence[int],
        columns: int,
        page_size: int,
        mask: Tensor,
        padded: bool,
        agree: Callable[[bool], bool],
    ) -> None:
        device, most = mask.device, max(sizes)
        self._forward, self._windows, self._plan, self._mask = forward, tuple(windows), plan, mask
        self._page_size, self._padded, self._agree = page_size, padded, agree
        self._token_ids = torch.zeros(most, dtype=torch.int32, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._cache_index = torch.arange(most, dtype=torch.int64, device=device) % page_size
        self._pages = torch.zeros((most, columns), dtype=torch.int32, device=device)
        self._dump = torch.arange(min(most, page_size), dtype=torch.int64, device=device)
        self._graphs: dict[int, _Graph] = {}
        self._replayed = torch.npu.Event()
        self._capture([size for size in sizes if size <= page_size or not padded])

    @property
    def sizes(self) -> list[int]:
        """Rows of each graph there is, ascending."""
        return sorted(self._graphs)

    def run(self, batch: ForwardBatch, part: FusedPart) -> Tensor | None:
        """What ``forward`` gives for the batch, whose attention is the one call ``part``; None when no graph fits.

        The result is overwritten by the next call.
        """
        rows = len(part.lengths)
        size = next((size for size in self.sizes if size >= rows), 0)
        if not size or (size > rows and not self._padded) or size - rows > self._page_size:
            return None
        self._token_ids[:rows].copy_(batch.token_ids)
        self._positions[:rows].copy_(batch.positions)
        self._cache_index[:rows].copy_(batch.cache_index)
        self._pages[:rows, : part.pages.shape[1]].copy_(part.pages)
        if size > rows:
            self._cache_index[rows:size].copy_(self._dump[: size - rows])
            self._pages[rows:size, :1].zero_()
        graph = self._graphs[size]
        lengths = part.lengths + [1] * (size - rows)
        # The replay goes first: its attention waits for the lengths, and the device works on what comes before it
        # while they are fed on a stream of their own. That stream must not be ahead of the replay before, which may
        # still wait for its own lengths, or read them.
        graph.graph.replay()
        graph.graph.graph_dispatch_mode.update_stream.wait_event(self._replayed)
        graph.graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths}])  # one entry: for every call
        self._replayed.record()
        return graph.hidden[:rows]

    def _batch(self, size: int) -> ForwardBatch:
        def part(window: int) -> FusedPart:
            return FusedPart(0, size, [*range(1, size + 1)], [1] * size, self._pages[:size], self._mask, window)

        return ForwardBatch(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            cache_index=self._cache_index[:size],
            plans={window: self._plan(part(window)) for window in self._windows},
        )

    def _capture(self, sizes: Sequence[int]) -> None:
        """What cannot be captured runs without a graph, and the log says so."""
        if os.environ.get("ASCEND_LAUNCH_BLOCKING") == "1":
            _log.warning("ASCEND_LAUNCH_BLOCKING=1 forbids graphs: decodes run without.")
            return
        pool = None
        for size in sorted(sizes, reverse=True):
            batch = self._batch(size)
            self._cache_index.copy_(torch.arange(len(self._cache_index), device=self._mask.device) % self._page_size)
            before = torch.npu.current_stream()
            graph: torch.npu.NPUGraph | None = None
            failure: RuntimeError | None = None
            try:
                graph = torch.npu.NPUGraph()  # takes a stream to update it on, and there may be none
                for _ in range(2):  # kernels and communicators are made at first use, which cannot be captured
                    self._forward(batch)
                torch.npu.synchronize()
                with torch.npu.graph(graph, pool=pool, auto_dispatch_capture=True):
                    hidden = self._forward(batch)
                if not graph.graph_dispatch_mode.graph_dispatch_records:
                    raise RuntimeError("attention was captured with its lengths of now, and nothing would update them")
            except RuntimeError as error:
                _leave(graph, before)
                failure = error
            if not self._agree(failure is None):
                self._explain(size, failure or RuntimeError("another rank could not"))
                return
            assert graph is not None
            pool = pool or graph.pool()
            self._graphs[size] = _Graph(graph, hidden)

    def _explain(self, size: int, error: RuntimeError) -> None:
        first: BaseException = error  # ending a capture that failed fails again: what came before it is the cause
        while first.__context__ is not None:
            first = first.__context__
        cause = str(first).strip().splitlines()[0] if str(first).strip() else type(first).__name__
        hint = "--disable-cuda-graph silences this"
        if first_code(str(first)) in _OUT_OF_STREAMS:
            hint = "the device has no stream left for it: lower --cuda-graph-max-bs or shorten --cuda-graph-bs"
        left = f"graphs of {self.sizes} rows are used" if self._graphs else "all decodes run without a graph"
        _log.warning("The decode of %d rows could not be captured into a graph (%s); %s. %s", size, cause, left, hint)


def _leave(graph: torch.npu.NPUGraph | None, stream: torch.npu.Stream) -> None:
    """Undo what a capture that raised leaves behind: its stream as the current one, and the mode that catches
    attention.
    Attention would go on to wait for an event that nobody records."""
    torch.npu.set_stream(stream)
    mode = getattr(graph, "graph_dispatch_mode", None)
    if mode is not None and mode in _get_current_dispatch_mode_stack():
        mode.__exit__(None, None, None)
