"""CUDA graphs of steps with chunks of prompts, and of decodes in the same step.

On a small model the device runs a prompt faster than the host launches its kernels. A graph has a fixed number of
tokens and rows. A step describes itself to the graph by numbers: where each token comes from and goes to, the tiles of
the prompts' attention, and the last token of each row. Missing tokens are padding in the null page. Rows that are not
decodes attend to one token in decode attention, and the prompts' attention overwrites their results.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.contract.caches import CacheSpec, Window
from kernels.core.arrays import ragged
from kernels.core.attention_rows import PromptTokens
from kernels.core.batch import BoundedRows, ForwardBatch
from kernels.devices.capture import StepCaptureRequest
from kernels.devices.cuda.attention.decode import split_count
from kernels.devices.cuda.attention.plan import AttentionPlan, DecodeRows
from kernels.devices.cuda.attention.prefill import TILE, PrefillBlocks
from kernels.devices.cuda.graphs.decode_graphs import Kind, capture_each, launches_last
from kernels.devices.cuda.graphs.step_graphs import leave
from kernels.devices.cuda.launch import is_precompiling
from kernels.devices.graphs import Put
from kernels.devices.prepared import CapturedStepResult

__all__ = ["PromptGraphs", "prompt_sizes"]

_log = logging.getLogger("troupe.kernels.cuda")

_HEADER = 5
"""Numbers of a row before its pages: three as in ``leave``, one of padding, and the tokens that a decode attends to."""
_CHUNKS = 64  # most rows of a step that are not decodes
_ROWS = (8, 64, 256)
_MIN_TOKENS = 128  # fewest tokens of a graph; further sizes are powers of two
_KIND = Kind(
    "step of (tokens, rows) %s with prompts",
    "--disable-piecewise-cuda-graph silences this",
    "lower --mem-fraction-static or --piecewise-cuda-graph-max-tokens",
    smaller=True,
)

Size = tuple[int, int]
"""The tokens and the rows of a step."""


def prompt_sizes(requested: Sequence[int], max_tokens: int, max_rows: int) -> list[Size]:
    """The tokens and rows of each graph, ascending. ``requested``: a list of tokens, or none for powers of two and the
    decodes beside them. ``max_tokens``: tokens of a step, ``max_rows``: of its rows. Useless sizes of the list are
    logged.
    """
    rows = sorted({min(count, max_rows) for count in (*_ROWS, max_rows)})
    useless = sorted(size for size in set(requested) if not rows[0] <= size <= max_tokens)
    if useless:
        _log.warning(
            "--piecewise-cuda-graph-tokens: no graph of %s tokens, as one holds %d rows and a step has up to %d; "
            "leave these out, or raise --chunked-prefill-size.",
            useless,
            rows[0],
            max_tokens,
        )
    chunks = [
        1 << bits for bits in range(_MIN_TOKENS.bit_length() - 1, max_tokens.bit_length()) if 1 << bits < max_tokens
    ]
    result: set[Size] = set()
    for index, count in enumerate(rows):
        beside = count if index else 0
        tokens = requested or (*(chunk + beside for chunk in chunks), max_tokens)
        result |= {(size, count) for size in tokens if count <= size <= max_tokens}
    return sorted(result)


@dataclass(frozen=True)
class _Numbers:
    """The input of a step's graph, int32 ``words``: the first ``longs`` are int64, the slots, positions and
    places in each of the ``tables`` caches of its tokens and the last token of each row; then tiles [tiles, 4] as
    ``PrefillBlocks`` has them, a row's pages named by where they begin.
    """

    longs: int
    words: int

    @classmethod
    def from_size(cls, size: Size, tables: int) -> _Numbers:
        tokens, rows = size
        longs = (2 + tables) * tokens + rows
        return cls(longs, 2 * longs + 4 * (-(-tokens // TILE) + min(rows, _CHUNKS)))


_NOTHING = PromptTokens(
    slots=np.zeros(1, dtype=np.int64),
    starts=np.zeros(1, dtype=np.int64),
    counts=np.ones(1, dtype=np.int64),
    grows=np.zeros(1, dtype=np.bool_),
    pages=np.zeros((1, 1), dtype=np.int32),
    decodes=1,
)
"""The row that graphs are captured with: a decode in the null page."""


class PromptGraphs:
    """Captures steps of ``sizes``, the largest first. ``paying``: only those that pay. ``fits``: returns whether memory
    suffices for the graphs so far. For the rest see ``StepGraphs``.
    """

    def __init__(
        self,
        request: StepCaptureRequest,
        sizes: Sequence[Size],
        kv_heads: int,
        page_size: int,
        paying: bool,
        fits: Callable[[], bool],
        put: Put,
    ) -> None:
        columns, device = request.columns, request.table.device
        self._forward, self._table, self._windows = request.forward, request.table, request.windows
        self._kv_heads, self._page_size, self._put = kv_heads, page_size, put
        rows = max((size[1] for size in sizes), default=0)
        # Row 0 is the row of padding tokens: its pages are page 0.
        # Rows begin where a vector does, as other steps' do: kernels are compiled for that once.
        width = -(-(_HEADER + max(columns, -(-TILE // page_size))) // 4) * 4
        # Groups of layers with a page table of their own have a copy whose pages are theirs.
        self._bounded, self._tables = request.bounded, 1 + len(request.bounded)
        self._states = torch.zeros((self._tables, 1 + rows, width), dtype=torch.int32, device=device)
        self._states[:, :, 2] = self._states[:, :, _HEADER - 1] = 1  # a token in the cache
        nothing = replace(_NOTHING, bounded=tuple(_NOTHING.pages for _ in self._bounded))
        self._numbers = {size: put(self._fill(nothing, size)) for size in sizes}
        self._max_prompts = rows
        self._kept: tuple[Tensor, Tensor] | None = None
        begun = time.perf_counter()
        self._prompts = max((size[0] for size in sizes), default=0)  # tokens of prompts in a step, at most
        if paying and not is_precompiling():
            self._prompts, sizes = self._paying(sizes)
            self._max_prompts = max((size[1] for size in sizes), default=0)
            self._kept = None  # of the sizes that are left, instead
        captured = capture_each(
            sorted(sizes, reverse=True),
            self._run,
            device,
            lambda could: could and fits(),
            _KIND,
        )
        self._graphs = captured
        self.sizes = sorted(captured)
        if is_precompiling():
            return
        taken = time.perf_counter() - begun
        _log.info("Steps with prompts: graphs of (tokens, rows) %s, captured in %.2f s.", self.sizes, taken)

    def run(self, prompts: PromptTokens) -> CapturedStepResult | None:
        """Run the step; None if no graph fits it."""
        count, tokens = len(prompts.slots), int(prompts.counts.sum())
        if count - prompts.decodes > _CHUNKS or tokens - prompts.decodes > self._prompts:  # that many did not pay
            return None
        size = next((size for size in self.sizes if size[0] >= tokens and size[1] >= count), None)
        if size is None:
            return None
        numbers = self._fill(prompts, size)
        states = np.zeros((self._tables, size[1], _HEADER + prompts.pages.shape[1]), dtype=np.int32)
        state = states[0]
        state[:, 2] = state[:, _HEADER - 1] = 1
        state[:count, 0], state[:count, 1] = prompts.slots, prompts.grows
        state[:count, 2] = prompts.starts + prompts.counts
        state[: prompts.decodes, _HEADER - 1] = prompts.starts[: prompts.decodes] + 1
        for own, pages in zip(states, (prompts.pages, *prompts.bounded), strict=True):
            own[:count, _HEADER:] = pages
        new = self._put(np.concatenate((numbers, states.ravel())))
        self._numbers[size].copy_(new[: len(numbers)])
        self._states[:, 1 : 1 + size[1], : states.shape[2]].copy_(new[len(numbers) :].view(states.shape))
        replay, result = self._graphs[size]
        replay()
        return CapturedStepResult(result.hidden[:count], result.logits[:count], result.argmax[:count])

    def _fill(self, prompts: PromptTokens, size: Size) -> npt.NDArray[np.int32]:
        """The numbers of ``size``."""
        tokens, layout = int(prompts.counts.sum()), _Numbers.from_size(size, self._tables)
        numbers = np.zeros(layout.words, dtype=np.int32)
        longs = numbers[: 2 * layout.longs].view(np.int64)
        firsts = (2 + self._tables) * size[0]
        slots, positions, *indices = longs[:firsts].reshape(-1, size[0])
        row = np.repeat(np.arange(len(prompts.slots)), prompts.counts)
        at = ragged(prompts.starts, prompts.counts)
        slots[:tokens], positions[:tokens] = prompts.slots[row], at
        for index, owned in zip(indices, (prompts.pages, *prompts.bounded), strict=True):
            index[:tokens] = owned[row, at // self._page_size] * np.int64(self._page_size) + at % self._page_size
            index[tokens:] = np.arange(size[0] - tokens) % self._page_size
        offsets = np.cumsum(prompts.counts) - prompts.counts
        longs[firsts : firsts + len(prompts.slots)] = offsets + prompts.counts - 1
        # Rows of prompts and the padding row, each of whose tiles starts at position 0.
        some, stride = slice(prompts.decodes, None), self._states.shape[2]
        missing = size[0] - tokens
        counts = np.append(prompts.counts[some], missing)
        each = -(-counts // TILE)
        begin = ragged(np.zeros(len(each), dtype=np.int64), each) * TILE
        of = np.repeat(np.arange(len(each)), each)
        pages = np.append(1 + np.arange(prompts.decodes, len(prompts.slots)), 0) * stride + _HEADER
        first = np.append(offsets[some], tokens)
        position = np.append(prompts.starts[some], 0)[of] + np.where(of < len(each) - 1, begin, 0)
        tiles = np.stack((pages[of], first[of] + begin, np.minimum(counts[of] - begin, TILE), position), axis=1)
        numbers[2 * layout.longs :][: tiles.size] = tiles[np.argsort(-position, kind="stable")].ravel()
        return numbers

    def _paying(self, sizes: Sequence[Size]) -> tuple[int, list[Size]]:
        """Find the number of prompt tokens up to which steps are bound by the host, and the sizes up to it. Never
        fails: without memory there are no sizes."""
        min_prompts, max_tokens = min((size[1] for size in sizes), default=0), 0
        for size in sorted(size for size in sizes if size[1] == min_prompts):
            try:
                if not launches_last(partial(self._run, size), self._table.device):
                    break
            except torch.OutOfMemoryError:
                break
            max_tokens = size[0]
        return max_tokens, [
            size for size in sizes if max_tokens and size[0] - (size[1] if size[1] > min_prompts else 0) <= max_tokens
        ]

    def _run(self, size: Size) -> CapturedStepResult:
        (tokens, rows), layout = size, _Numbers.from_size(size, self._tables)
        numbers = self._numbers[size]
        longs = numbers[: 2 * layout.longs].view(torch.int64)
        firsts = (2 + self._tables) * tokens
        slots, positions, *indices = longs[:firsts].view(-1, tokens)
        last, tiles = longs[firsts:], numbers[2 * layout.longs :].view(-1, 4)
        state, context = self._states[0, 1 : 1 + rows], (self._states.shape[2] - _HEADER) * self._page_size
        decodes = DecodeRows(state[:, _HEADER - 1 :], split_count(rows, self._kv_heads, context))
        blocks = PrefillBlocks(tiles, self._states[0].view(-1, 1), TILE // 2, tokens > TILE)
        plans = {window: AttentionPlan(decodes, blocks, window) for window in self._windows}
        bounded: dict[CacheSpec, BoundedRows] = {}
        for group, index, own in zip(self._bounded, indices[1:], self._states[1:], strict=True):
            spec = group.group.spec
            assert isinstance(spec, Window), "prompts over states run without graphs"
            there = replace(decodes, own_pages=own[1 : 1 + rows, _HEADER:])
            plan = AttentionPlan(there, replace(blocks, pages=own.view(-1, 1)), spec.length)
            bounded[spec] = BoundedRows.captured(self._page_size, index, plan)
        ids = self._table[slots, positions]
        hidden, logits = self._forward(ForwardBatch(ids, positions, indices[0], plans, bounded=bounded), last)
        result = torch.empty(rows, dtype=torch.int32, device=state.device)
        if self._kept is None:
            self._kept = (
                hidden.new_empty(self._max_prompts, hidden.shape[1]),
                logits.new_empty(self._max_prompts, logits.shape[1]),
            )
        # In buffers that all graphs share: memory of one graph cannot be used by others.
        kept = CapturedStepResult(self._kept[0][:rows], self._kept[1][:rows], result)
        leave(state, self._table, logits, kept.logits, result)
        kept.hidden.copy_(hidden)
        return kept
