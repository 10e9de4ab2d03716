"""Graphs of decodes and drafts on an NPU: one for each batch size in a list, replayed for batches of up to that size.

A graph also captures host values. Attention reads the lengths of sequences on the host to plan its work, so every
attention call of the graph is updated before a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kernels.core.attention_rows import AttentionRows
from kernels.core.batch import ForwardBatch
from kernels.core.tree import chain_bits
from kernels.devices.capture import CaptureRequest
from kernels.devices.graphs import GraphBuffers, Put, padded_places
from kernels.devices.npu.captured import CapturedGraphs, Plans
from kernels.devices.npu.fused_attention import FusedPart
from kernels.devices.npu.tree_attention import TreePart, hidden_keys, mask_keys

__all__ = ["DecodeGraphs"]


class DecodeGraphs:
    """Captures ``request`` for each of ``sizes`` rows, the largest first, in one memory pool.

    ``plan``: the attention plan of one call. ``page_size``: each padding token needs a separate slot of the null page,
    so a graph has at most this many. ``mask``: of the fused attention. ``padded``: whether a step may use a graph of a
    larger batch.
    """

    def __init__(
        self,
        request: CaptureRequest,
        sizes: Sequence[int],
        plan: Plans,
        page_size: int,
        mask: Tensor,
        padded: bool,
        put: Put,
    ) -> None:
        device, rows, tokens, columns = mask.device, max(sizes), request.tokens, request.columns
        self._forward, self._windows, self._plan, self._mask = request.forward, tuple(request.windows), plan, mask
        self._page_size, self._padded, self._put = page_size, padded, put
        self._tokens, self._tree = tokens, request.tree and tokens > 1
        self._buffers = GraphBuffers(rows, tokens, page_size, device, request.states)
        self._pages = torch.zeros((rows, columns), dtype=torch.int32, device=device)
        self._masks: dict[int, Tensor] = {}
        if self._tree:
            shape = (rows, 1, tokens, mask_keys(columns, page_size))
            self._masks = {window: torch.zeros(shape, dtype=torch.int8, device=device) for window in self._windows}
        self._graphs = CapturedGraphs(
            [size for size in sizes if size <= page_size or not padded], self._prepare, request.agree
        )

    @property
    def sizes(self) -> list[int]:
        """Batch sizes of the graphs, ascending."""
        return self._graphs.sizes

    @property
    def states(self) -> Tensor | None:
        """See ``CapturedPasses.states``."""
        return self._buffers.states

    def run(
        self, batch: ForwardBatch, rows: AttentionRows, pages: Tensor | None = None, size: int = 0
    ) -> Tensor | None:
        """The result of ``forward`` for a batch of decodes or drafts (``rows``); None if no graph fits.

        ``pages``: page table of the rows, if the device already has it. ``size``: rows that the graph has at least.
        The next call overwrites the result.
        """
        count, tokens = len(rows.starts), self._tokens
        size = next((each for each in self.sizes if each >= max(count, size)), 0)
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
        buffers = self._buffers
        places = buffers.places(rows, self._put)
        if lacking:
            absent = np.ones(size * tokens, dtype=np.bool_)
            absent[padded_places(rows.counts, tokens)] = False
            index = buffers.cache_index[: size * tokens]
            index.index_copy_(0, self._put(np.flatnonzero(absent)), buffers.null_slots[:lacking])
        buffers.fill(batch, places, size * tokens)
        if pages is None:
            pages = self._put(np.ascontiguousarray(rows.pages))
        self._pages[:count, : pages.shape[1]].copy_(pages)
        if size > count:
            self._pages[count:size, :1].zero_()
        for window, mask in self._masks.items():
            mask[:count].copy_(self._hidden(rows, mask.shape[-1], window))
            mask[count:size].zero_()
        hidden = self._graphs.replay(size, (rows.starts + tokens).tolist() + [tokens] * (size - count))
        return hidden[:whole] if places is None else hidden.index_select(0, places)

    def _hidden(self, rows: AttentionRows, keys: int, window: int) -> Tensor:
        """The mask of all rows as trees, including decodes."""
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

        return self._buffers.batch(size, {window: self._plan(part(window)) for window in self._windows})

    def _prepare(self, size: int) -> Callable[[], Tensor]:
        """What a graph of ``size`` rows captures."""
        batch = self._batch(size)
        self._buffers.cache_index.copy_(self._buffers.null_slots)
        return lambda: self._forward(batch)
