"""Steps with chunks of prompts in CUDA graphs: as ``steps`` for decodes, and decodes beside them.

A prompt of a small model takes the device less time than the host takes to launch its kernels. A graph holds so many
tokens of so many rows at most, and what a step has of both is told to it in numbers: where each token comes from and
goes to, the tiles of the prompts' attention, and the last token of each row. Tokens that a step does not have are a
row's in the dump page. Rows that are no decodes see a token as these, and what they find is overwritten by what the
prompts' attention finds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.cuda.attention import AttentionPlan, DecodeRows
from kernels.cuda.decode import split_count
from kernels.cuda.graphs import Kind, Put, capture_each, launches_last
from kernels.cuda.launch import looking_ahead
from kernels.cuda.prefill import TILE, PrefillBlocks
from kernels.cuda.steps import leave
from kernels.platforms.prepared import StepForward, StepFound
from kernels.platforms.rows import PromptTokens
from kernels.rows import ragged

__all__ = ["PromptGraphs", "prompt_sizes"]

_log = logging.getLogger("troupe.kernels.cuda")

_HEADER = 5
"""Numbers of a row before its pages: three as ``leave`` has them, one to fill up, and the tokens that a decode sees."""
_CHUNKS = 64  # rows of a step that are no decodes, at most
_ROWS = (8, 64, 256)
_FEWEST = 128  # tokens of a graph, and each power of two above it
_KIND = Kind(
    "step of (tokens, rows) %s with prompts",
    "--disable-piecewise-cuda-graph silences this",
    "lower --mem-fraction-static or --piecewise-cuda-graph-max-tokens",
    smaller=True,
)

Size = tuple[int, int]
"""The tokens and the rows of a step."""


def prompt_sizes(asked: Sequence[int], most: int, max_rows: int) -> list[Size]:
    """Of each graph, ascending. ``asked``: a list of tokens, or none for powers of two and the decodes beside them.
    ``most``: tokens of a step, ``max_rows``: of its rows. The log says which of those asked for are of no use.
    """
    rows = sorted({min(count, max_rows) for count in (*_ROWS, max_rows)})
    useless = sorted(size for size in set(asked) if not rows[0] <= size <= most)
    if useless:
        _log.warning(
            "--piecewise-cuda-graph-tokens: no graph of %s tokens, as one holds %d rows and a step has up to %d; "
            "leave these out, or raise --chunked-prefill-size.",
            useless,
            rows[0],
            most,
        )
    chunks = [1 << bits for bits in range(_FEWEST.bit_length() - 1, most.bit_length()) if 1 << bits < most]
    found: set[Size] = set()
    for index, count in enumerate(rows):
        beside = count if index else 0
        tokens = asked or (*(chunk + beside for chunk in chunks), most)
        found |= {(size, count) for size in tokens if count <= size <= most}
    return sorted(found)


@dataclass(frozen=True)
class _Numbers:
    """What a graph is told of a step, in int32 ``words``: the first ``longs`` are int64, the slots, positions and
    places in the cache of its tokens and the last token of each row; then tiles [tiles, 4] as ``PrefillBlocks`` has
    them, a row's pages named by where they begin.
    """

    longs: int
    words: int

    @classmethod
    def of(cls, size: Size) -> _Numbers:
        tokens, rows = size
        return cls(3 * tokens + rows, 2 * (3 * tokens + rows) + 4 * (-(-tokens // TILE) + min(rows, _CHUNKS)))


_NOTHING = PromptTokens(
    *(np.array([number]) for number in (0, 0, 1, False)), pages=np.zeros((1, 1), dtype=np.int32), decodes=1
)
"""What graphs are captured with: a decode in the dump page."""


class PromptGraphs:
    """Captures steps of ``sizes``, the largest first. ``paying``: only where a graph pays. ``fits``: whether there is
    memory enough for the graphs so far. The rest is as ``StepGraphs`` says.
    """

    def __init__(
        self,
        forward: StepForward,
        table: Tensor,
        windows: Sequence[int],
        sizes: Sequence[Size],
        kv_heads: int,
        columns: int,
        page_size: int,
        paying: bool,
        fits: Callable[[], bool],
        put: Put,
    ) -> None:
        device = table.device
        self._forward, self._table, self._windows = forward, table, windows
        self._kv_heads, self._page_size, self._put = kv_heads, page_size, put
        rows = max((size[1] for size in sizes), default=0)
        # Row 0 is that of tokens that are not there: its pages are page 0.
        # Rows begin where a vector does, as other steps' do: kernels are compiled for that once.
        width = -(-(_HEADER + max(columns, -(-TILE // page_size))) // 4) * 4
        self._state = torch.zeros((1 + rows, width), dtype=torch.int32, device=device)
        self._state[:, 2] = self._state[:, _HEADER - 1] = 1  # a token in the cache
        self._numbers = {size: put(self._fill(_NOTHING, size)) for size in sizes}
        self._most = rows
        self._kept: tuple[Tensor, Tensor] | None = None
        begun = time.perf_counter()
        self._prompts = max((size[0] for size in sizes), default=0)  # tokens of prompts in a step, at most
        if paying and not looking_ahead():
            self._prompts, sizes = self._paying(sizes)
            self._most = max((size[1] for size in sizes), default=0)
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
        if looking_ahead():
            return
        taken = time.perf_counter() - begun
        _log.info("Steps with prompts: graphs of (tokens, rows) %s, captured in %.2f s.", self.sizes, taken)

    def run(self, given: PromptTokens) -> StepFound | None:
        """What the step gives; None when no graph fits it."""
        count, tokens = len(given.slots), int(given.counts.sum())
        if count - given.decodes > _CHUNKS or tokens - given.decodes > self._prompts:  # that many did not pay
            return None
        size = next((size for size in self.sizes if size[0] >= tokens and size[1] >= count), None)
        if size is None:
            return None
        numbers = self._fill(given, size)
        state = np.zeros((size[1], _HEADER + given.pages.shape[1]), dtype=np.int32)
        state[:, 2] = state[:, _HEADER - 1] = 1
        state[:count, 0], state[:count, 1], state[:count, 2] = given.slots, given.grows, given.starts + given.counts
        state[: given.decodes, _HEADER - 1] = given.starts[: given.decodes] + 1
        state[:count, _HEADER:] = given.pages
        new = self._put(np.concatenate((numbers, state.ravel())))
        self._numbers[size].copy_(new[: len(numbers)])
        self._state[1 : 1 + size[1], : state.shape[1]].copy_(new[len(numbers) :].view(state.shape))
        replay, found = self._graphs[size]
        replay()
        return StepFound(found.hidden[:count], found.logits[:count], found.likeliest[:count])

    def _fill(self, given: PromptTokens, size: Size) -> npt.NDArray[np.int32]:
        """The numbers of ``size``."""
        tokens, layout = int(given.counts.sum()), _Numbers.of(size)
        numbers = np.zeros(layout.words, dtype=np.int32)
        longs = numbers[: 2 * layout.longs].view(np.int64)
        slots, positions, index = longs[: 3 * size[0]].reshape(3, size[0])
        row = np.repeat(np.arange(len(given.slots)), given.counts)
        at = ragged(given.starts, given.counts)
        slots[:tokens], positions[:tokens] = given.slots[row], at
        index[:tokens] = given.pages[row, at // self._page_size] * np.int64(self._page_size) + at % self._page_size
        index[tokens:] = np.arange(size[0] - tokens) % self._page_size
        offsets = np.cumsum(given.counts) - given.counts
        longs[3 * size[0] : 3 * size[0] + len(given.slots)] = offsets + given.counts - 1
        # The rows of prompts, and that of the tokens that are not there, each of whose tiles begins anew.
        some, stride = slice(given.decodes, None), self._state.shape[1]
        missing = size[0] - tokens
        counts = np.append(given.counts[some], missing)
        each = -(-counts // TILE)
        begin = ragged(np.zeros(len(each), dtype=np.int64), each) * TILE
        of = np.repeat(np.arange(len(each)), each)
        pages = np.append(1 + np.arange(given.decodes, len(given.slots)), 0) * stride + _HEADER
        first = np.append(offsets[some], tokens)
        position = np.append(given.starts[some], 0)[of] + np.where(of < len(each) - 1, begin, 0)
        tiles = np.stack((pages[of], first[of] + begin, np.minimum(counts[of] - begin, TILE), position), axis=1)
        numbers[2 * layout.longs :][: tiles.size] = tiles[np.argsort(-position, kind="stable")].ravel()
        return numbers

    def _paying(self, sizes: Sequence[Size]) -> tuple[int, list[Size]]:
        """How few tokens of prompts it takes that the host is what they wait for, and the sizes for these. Fails
        nobody: without memory none is."""
        fewest, most = min((size[1] for size in sizes), default=0), 0
        for size in sorted(size for size in sizes if size[1] == fewest):
            try:
                if not launches_last(partial(self._run, size), self._table.device):
                    break
            except torch.OutOfMemoryError:
                break
            most = size[0]
        return most, [size for size in sizes if most and size[0] - (size[1] if size[1] > fewest else 0) <= most]

    def _run(self, size: Size) -> StepFound:
        (tokens, rows), layout = size, _Numbers.of(size)
        numbers = self._numbers[size]
        longs = numbers[: 2 * layout.longs].view(torch.int64)
        slots, positions, index = longs[: 3 * tokens].view(3, tokens)
        last, tiles = longs[3 * tokens :], numbers[2 * layout.longs :].view(-1, 4)
        state, context = self._state[1 : 1 + rows], (self._state.shape[1] - _HEADER) * self._page_size
        decodes = DecodeRows(state[:, _HEADER - 1 :], split_count(rows, self._kv_heads, context))
        blocks = PrefillBlocks(tiles, self._state.view(-1, 1), TILE // 2, tokens > TILE)
        plans = {window: AttentionPlan(decodes, blocks, window) for window in self._windows}
        hidden, logits = self._forward(ForwardBatch(self._table[slots, positions], positions, index, plans), last)
        found = torch.empty(rows, dtype=torch.int32, device=state.device)
        if self._kept is None:
            self._kept = hidden.new_empty(self._most, hidden.shape[1]), logits.new_empty(self._most, logits.shape[1])
        # In places that all graphs share: what each keeps of its own, no other can use.
        kept = StepFound(self._kept[0][:rows], self._kept[1][:rows], found)
        leave(state, self._table, logits, kept.logits, found)
        kept.hidden.copy_(hidden)
        return kept
