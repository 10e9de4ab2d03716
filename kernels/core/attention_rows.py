"""The rows of a step as host arrays, the input of a device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.core.arrays import Longs
from kernels.core.operators import Draws

__all__ = ["AttentionRows", "DecodeTokens", "PromptTokens", "StepTokens", "TokenTable"]


@dataclass(frozen=True)
class AttentionRows:
    """The rows of a step as attention sees them; host arrays. Row r's queries follow those of row r - 1.

    ``starts``, ``counts`` int64 [rows]: row r runs positions ``starts[r] .. starts[r] + counts[r] - 1`` of the cache.
    ``pages`` int32 [rows, pages]: page i of a row holds its positions ``i * page_size ..``.
    ``decodes``: the first so many rows run one token each.
    ``verifies``: so many rows after the decodes run 1 to 64 tokens each, of which most are draft tokens.
    ``tree`` int64 [verifies, most tokens], on the device: what each of their queries sees from position ``roots[row]``
    on: bit j is position ``roots[row] + j``; all before is seen (``DraftTree.bits``; up to 64 positions, the query's
    own among them). A window counts from the query's place in its path: ``roots[row]`` and one more for each bit but
    one. None: all are causal, as chains are.
    ``roots`` int64 [verifies]; None: the rows' starts.
    """

    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    pages: npt.NDArray[np.int32]
    decodes: int
    verifies: int = 0
    tree: Tensor | None = None
    roots: npt.NDArray[np.int64] | None = None

    def divided(self, threshold: float) -> tuple[tuple[AttentionRows, Longs], tuple[AttentionRows, Longs]] | None:
        """Divide the rows into two parts with about the same number of tokens. Returns each part with the indices
        (int64) of its rows, or None for a single row that may not be cut.

        If a division between rows leaves one part less than ``threshold`` of all tokens, a row is cut in two; its
        second part attends to the keys of the first. 0: no row is cut. Raises ValueError for rows that verify draft
        tokens.
        """
        if self.verifies:
            raise ValueError("rows that verify draft tokens cannot be divided")
        ends = np.cumsum(self.counts)
        total, inner = int(ends[-1]), ends[:-1]
        middle = int(inner[np.abs(2 * inner - total).argmin()]) if len(inner) else 0
        if min(middle, total - middle) < threshold * total:
            middle = total // 2
        if not middle:
            return None
        row = int(np.searchsorted(ends, middle))  # the last one of the first part
        rest = int(ends[row]) - middle
        first, second = np.arange(row + 1), np.arange(row if rest else row + 1, len(ends))
        counts, others, starts = self.counts[first], self.counts[second], self.starts[second]
        if rest:
            counts[-1] -= rest
            starts[0] += others[0] - rest
            others[0] = rest
        decodes = min(self.decodes, len(first))
        left = AttentionRows(self.starts[first], counts, self.pages[first], decodes)
        right = AttentionRows(starts, others, self.pages[second], self.decodes - decodes)
        return (left, first), (right, second)

    def in_chunks(self, size: int, page_size: int) -> AttentionRows:
        """Rows that end where a chunk of ``size`` positions does, and whose positions are counted from its first.

        The queries are the same ones, in the same order. ``size``: a multiple of ``page_size``, so that no page holds
        tokens of two chunks. Raises ValueError for rows that verify draft tokens.
        """
        if self.verifies or size % page_size:
            raise ValueError(f"rows cannot be cut into chunks of {size} in pages of {page_size}")
        first, last = self.starts // size, (self.starts + self.counts - 1) // size
        pieces = last - first + 1
        row = np.repeat(np.arange(len(pieces)), pieces)
        chunk = np.arange(len(row)) + np.repeat(first - np.cumsum(pieces) + pieces, pieces)
        begin = chunk * size
        low = np.maximum(self.starts[row], begin)
        high = np.minimum((self.starts + self.counts)[row], begin + size)
        columns, width = -(-int((high - begin).max(initial=1)) // page_size), self.pages.shape[1]
        at = (begin // page_size)[:, None] + np.arange(columns)
        pages = np.where(at < width, self.pages[row[:, None], np.minimum(at, width - 1)], 0).astype(np.int32)
        return AttentionRows(low - begin, high - low, pages, self.decodes)


@dataclass(frozen=True)
class StepTokens:
    """A step of decodes of one token a row, on the host; the tokens themselves the device knows."""

    slots: npt.NDArray[np.int64]  # [rows]
    lengths: npt.NDArray[np.int64]  # [rows], tokens that each row's sees, itself included
    grows: npt.NDArray[np.bool_]  # [rows], whether it is the last that is known of its row
    pages: npt.NDArray[np.int32]  # [rows, columns]
    bounded: tuple[npt.NDArray[np.int32], ...] = ()  # of each group of windows, like ``pages``
    draws: Draws | None = None  # [rows], if all rows may be drawn so: a device that can may do it


@dataclass(frozen=True)
class PromptTokens:
    """A step of chunks of prompts, of which the first ``decodes`` rows are decodes, on the host; the tokens themselves
    the device knows. ``pages`` as ``AttentionRows``.
    """

    slots: npt.NDArray[np.int64]  # [rows]
    starts: npt.NDArray[np.int64]  # [rows], the position of the first token
    counts: npt.NDArray[np.int64]  # [rows]
    grows: npt.NDArray[np.bool_]  # [rows], whether its last token is the last that is known of the row
    pages: npt.NDArray[np.int32]  # [rows, columns]
    decodes: int
    bounded: tuple[npt.NDArray[np.int32], ...] = ()  # of each group of windows, like ``pages``


@dataclass(frozen=True)
class DecodeTokens:
    """Decodes of one token a row, or with ``offsets`` of several, on the host."""

    ids: npt.NDArray[np.int32]  # [tokens]
    positions: npt.NDArray[np.int64]  # [tokens]
    index: npt.NDArray[np.int64]  # [tokens], places in the cache: page * page_size + offset
    pages: npt.NDArray[np.int32]  # [rows, columns]
    lengths: npt.NDArray[np.int64]  # [rows], tokens that the last of each sees, itself included
    offsets: npt.NDArray[np.int64] | None = None  # [rows + 1], where each row's tokens begin, and all of them end
    bits: npt.NDArray[np.int64] | None = None  # [rows, n], what each token sees, as AttentionRows.tree; None: chains


@dataclass(frozen=True)
class TokenTable:
    """Tokens, lengths and pages of the sequences by slot, in host arrays that stay in place."""

    tokens: npt.NDArray[np.int32]  # [slots, positions]
    known: npt.NDArray[np.int64]  # [slots], how many of them there are
    computed: npt.NDArray[np.int64]  # [slots], of these, with keys and values in the cache
    targets: npt.NDArray[np.int64]  # [slots], tokens at which a sequence ends
    pages: npt.NDArray[np.int32]  # [slots, columns]
    page_count: npt.NDArray[np.int64]  # [slots]
    page_size: int
    stops: npt.NDArray[np.int32]  # [slots, n], ids of tokens that end a sequence, and -1 where there are no more,
    stops_from: npt.NDArray[np.int64]  # [slots], from this position on
