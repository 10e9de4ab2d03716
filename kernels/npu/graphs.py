"""Decodes and drafts in captured graphs: one for each number of rows in a list, replayed for up to so many rows.

A graph holds addresses and everything that was on the host when it was captured. What a step brings is therefore copied
into tensors that stay where they are, and the lengths of the sequences, which attention reads on the host to plan its
work, are fed to every attention call of the graph before it is replayed. Rows that a step does not have are filled up:
they run the first token of nowhere, write to the dump page and see keys of it. So are the tokens that a row has less
than the others.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from kernels.batch import ForwardBatch
from kernels.npu.attention import FusedPart
from kernels.npu.errors import first_code
from kernels.npu.tree_attention import TreePart, hidden_keys, mask_keys
from kernels.platforms.rows import AttentionRows
from kernels.speculative.tree import chain_bits

__all__ = ["DecodeGraphs"]

_log = logging.getLogger("troupe.kernels.npu")

_OUT_OF_STREAMS = (207005, 207007, 207008)

Forward = Callable[[ForwardBatch], Tensor]
"""``[tokens, hidden]`` of a batch."""

Plans = Callable[[FusedPart | TreePart], object]
"""The attention plan of a step that is this one call."""

Put = Callable[[np.ndarray], Tensor]
"""How an array gets to the device."""


@dataclass(frozen=True)
class _Graph:
    graph: torch.npu.NPUGraph
    hidden: Tensor


class DecodeGraphs:
    """Captures ``forward`` for batches of ``sizes`` rows of ``tokens`` tokens each, the largest first, in one memory
    pool.

    All tensors of a batch are views of the leading rows of the same buffers. ``columns``: pages a sequence may have.
    ``page_size``: tokens that are filled up have a slot of the dump page each, so at most so many can be.
    ``padded``: whether a step may use a graph of more rows than it has. ``agree``: whether all ranks of the model could
    do what this one could: a graph that one of them lacks is used by none. ``tree``, ``states``: as
    ``Platform.capture_decodes`` says.
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
        put: Put,
        tokens: int = 1,
        tree: bool = False,
        states: Tensor | None = None,
    ) -> None:
        device, rows = mask.device, max(sizes)
        most = rows * tokens
        self._forward, self._windows, self._plan, self._mask = forward, tuple(windows), plan, mask
        self._page_size, self._padded, self._agree, self._put = page_size, padded, agree, put
        self._tokens, self._tree = tokens, tree and tokens > 1
        self._token_ids = torch.zeros(most, dtype=torch.int32, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._cache_index = torch.arange(most, dtype=torch.int64, device=device) % page_size
        self._states = None if states is None else states.new_zeros(most, states.shape[1])
        self._pages = torch.zeros((rows, columns), dtype=torch.int32, device=device)
        self._dump = torch.arange(min(most, page_size), dtype=torch.int64, device=device)
        self._masks: dict[int, Tensor] = {}
        if self._tree:
            shape = (rows, 1, tokens, mask_keys(columns, page_size))
            self._masks = {window: torch.zeros(shape, dtype=torch.int8, device=device) for window in self._windows}
        self._graphs: dict[int, _Graph] = {}
        self._replayed = torch.npu.Event()
        self._capture([size for size in sizes if size <= page_size or not padded])

    @property
    def sizes(self) -> list[int]:
        """Rows of each graph there is, ascending."""
        return sorted(self._graphs)

    def run(self, batch: ForwardBatch, rows: AttentionRows, pages: Tensor | None = None) -> Tensor | None:
        """What ``forward`` gives for the batch, whose ``rows`` all decode or are drafts; None when no graph fits.

        ``pages``: those of the rows, where the device has them already.
        The result is overwritten by the next call.
        """
        count, tokens = len(rows.starts), self._tokens
        size = next((size for size in self.sizes if size >= count), 0)
        lacking = size * tokens - len(batch.token_ids)
        if not size or (size > count and not self._padded) or lacking > self._page_size:
            return None
        if rows.decodes + rows.verifies < count or int(rows.counts.max()) > tokens:
            return None
        longest = int(rows.starts.max()) + tokens
        if longest > self._pages.shape[1] * self._page_size or (
            rows.tree is not None and tokens > 1 and not self._tree
        ):
            return None
        whole = count * tokens
        places = None if len(batch.token_ids) == whole else self._places(rows)
        if lacking:
            index = self._cache_index[: size * tokens]
            absent = np.ones(size * tokens, dtype=np.bool_)
            absent[_within(rows.counts, tokens)] = False
            index.index_copy_(0, self._put(np.flatnonzero(absent)), self._dump[:lacking])
        for held, new in (
            (self._token_ids, batch.token_ids),
            (self._positions, batch.positions),
            (self._cache_index, batch.cache_index),
            (self._states, batch.states),
        ):
            if held is None or new is None:
                continue
            if places is None:
                held[:whole].copy_(new)
            else:
                held.index_copy_(0, places, new.to(held.dtype))
        if pages is None:
            pages = self._put(np.ascontiguousarray(rows.pages))
        self._pages[:count, : pages.shape[1]].copy_(pages)
        if size > count:
            self._pages[count:size, :1].zero_()
        for window, mask in self._masks.items():
            mask[:count].copy_(self._hidden(rows, mask.shape[-1], window))
            mask[count:size].zero_()
        graph = self._graphs[size]
        lengths = (rows.starts + tokens).tolist() + [tokens] * (size - count)
        # The replay goes first: its attention waits for the lengths, and the device works on what comes before it
        # while they are fed on a stream of their own. That stream must not be ahead of the replay before, which may
        # still wait for its own lengths, or read them.
        graph.graph.replay()
        graph.graph.graph_dispatch_mode.update_stream.wait_event(self._replayed)
        graph.graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths}])  # one entry: for every call
        self._replayed.record()
        return graph.hidden[:whole] if places is None else graph.hidden.index_select(0, places)

    def _places(self, rows: AttentionRows) -> Tensor:
        """Where the batch's tokens stand among those of rows that all have as many."""
        return self._put(_within(rows.counts, self._tokens))

    def _hidden(self, rows: AttentionRows, keys: int, window: int) -> Tensor:
        """The mask of all rows, decodes among them, as trees."""
        tokens, bits = self._tokens, chain_bits(self._tokens, self._mask.device)
        tree = bits.repeat(len(rows.starts), 1)
        roots = rows.starts.copy()
        if rows.tree is not None:
            nodes = min(tokens, rows.tree.shape[1])
            tree[rows.decodes :, :nodes].copy_(rows.tree[:, :nodes])
            if rows.roots is not None:
                roots[rows.decodes :] = rows.roots
        every = replace(rows, decodes=0, verifies=len(rows.starts), tree=tree, roots=roots)
        return hidden_keys(every, tokens, keys, window, self._put)

    def _batch(self, size: int) -> ForwardBatch:
        tokens = self._tokens

        def part(window: int) -> FusedPart | TreePart:
            lengths, pages = [tokens] * size, self._pages[:size]
            if self._tree:
                return TreePart(0, size * tokens, tokens, None, lengths, pages, self._masks[window][:size])
            ends = [*range(tokens, size * tokens + 1, tokens)]
            return FusedPart(0, size * tokens, ends, lengths, pages, self._mask, window)

        return ForwardBatch(
            token_ids=self._token_ids[: size * tokens],
            positions=self._positions[: size * tokens],
            cache_index=self._cache_index[: size * tokens],
            plans={window: self._plan(part(window)) for window in self._windows},
            states=None if self._states is None else self._states[: size * tokens],
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


def _within(counts: npt.NDArray[np.int64], tokens: int) -> npt.NDArray[np.int64]:
    """Places of rows' tokens where each row has room for ``tokens``."""
    first = np.repeat(np.arange(len(counts)) * tokens - (np.cumsum(counts) - counts), counts)
    return first + np.arange(len(first))


def _leave(graph: torch.npu.NPUGraph | None, stream: torch.npu.Stream) -> None:
    """Undo what a capture that raised leaves behind: its stream as the current one, and the mode that catches
    attention.
    Attention would go on to wait for an event that nobody records."""
    torch.npu.set_stream(stream)
    mode = getattr(graph, "graph_dispatch_mode", None)
    if mode is not None and mode in _get_current_dispatch_mode_stack():
        mode.__exit__(None, None, None)
