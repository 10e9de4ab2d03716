"""The input of one forward pass of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.contract.caches import CacheSpec, Window
from kernels.core.attention_rows import AttentionRows

__all__ = ["BoundedRows", "ForwardBatch", "StateRun", "StateSegments", "VerifyingRows"]


@dataclass(frozen=True)
class StateSegments:
    """Tokens of ``n`` rows that recurrent layers run in one call; all on the device.

    ``tokens`` int64 [n, count]: indices in the step, of each row ``count`` that follow one another. ``sources``,
    ``targets`` int64 [n]: pages of the states before and after them. The state before a row's first token is zero: its
    source is the null page. ``targets`` None: no state is written, as the tokens are drafts. ``fresh``: whether there
    may be rows that begin. ``lengths`` int64 [n]: tokens of each row; what follows is padding, which repeats the last
    one. None: all rows have ``count``. ``few``: of draft tokens, which kernels may run one after the other.
    """

    tokens: Tensor
    sources: Tensor
    targets: Tensor | None
    fresh: bool = False
    lengths: Tensor | None = None
    few: bool = False

    def part(self, begin: int, end: int) -> StateSegments:
        """Rows ``begin .. end - 1``."""
        rows = slice(begin, end)
        targets = None if self.targets is None else self.targets[rows]
        lengths = None if self.lengths is None else self.lengths[rows]
        return StateSegments(self.tokens[rows], self.sources[rows], targets, self.fresh, lengths, self.few)

    def take(self, x: Tensor) -> Tensor:
        """What ``x`` [tokens, ...] has of these tokens, [n, count, ...]."""
        return x.index_select(0, self.tokens.flatten()).view(*self.tokens.shape, *x.shape[1:])

    def without_padding(self, x: Tensor) -> Tensor:
        """``x`` [n, count, ...] with zeros where there is padding."""
        if self.lengths is None:
            return x
        padding = torch.arange(x.shape[1], device=x.device) >= self.lengths.unsqueeze(1)
        return x.masked_fill(padding.view(*padding.shape, *(1,) * (x.ndim - 2)), 0)

    def put(self, out: Tensor, results: Tensor) -> None:
        """Write ``results`` [n, count, ...] to the tokens' places of ``out`` [tokens, ...]."""
        if self.lengths is not None:  # padding has its row's last place: it gets what stands there, too
            places = torch.arange(results.shape[1], device=results.device)
            places = torch.minimum(places, self.lengths.unsqueeze(1) - 1)
            results = results[torch.arange(len(results), device=results.device).unsqueeze(1), places]
        out.index_copy_(0, self.tokens.flatten(), results.flatten(0, 1).to(out.dtype))


StateRun = Callable[[tuple[Tensor, ...], tuple[StateSegments, ...]], Tensor]
"""``(inputs, segments)`` -> results [tokens, ...]: run tokens on from their states. ``inputs`` [tokens, ...] each."""


@dataclass
class VerifyingRows:
    """The rows of a step whose states wait for the accepted tokens, and their ``tokens`` in the step. ``runs``: what
    the recurrent layers did with these tokens, to be done again with the accepted ones: each with the inputs of these
    tokens. ``stride``: from a row's first token to the next row's, in a captured pass; 0: rows follow one another.
    """

    rows: slice
    tokens: slice
    runs: list[tuple[StateRun, tuple[Tensor, ...]]] = field(default_factory=list)
    stride: int = 0

    def record(self, run: StateRun, inputs: tuple[Tensor, ...]) -> None:
        """Keep the tokens' part of a layer's ``inputs``."""
        tokens = self.tokens
        alone = all(len(x) == tokens.stop - tokens.start for x in inputs)
        self.runs.append((run, inputs if alone else tuple(x[tokens].clone() for x in inputs)))

    def use(self, captured: VerifyingRows, rows: int) -> None:
        """A captured pass has run the step's ``rows`` rows: none of them has written its states."""
        self.rows, self.stride, self.runs = slice(0, rows), captured.stride, list(captured.runs)


@dataclass(frozen=True)
class BoundedRows:
    """The rows of a step in a bounded cache group. Row r runs positions ``starts[r] .. starts[r] + counts[r] - 1``.

    ``pages`` int32 [rows, columns]: column i of a row holds tokens ``i * page_tokens ..``; the null page where the row
    neither reads nor writes. ``cache_index`` and ``plan`` as in ``ForwardBatch``, of a window; None of a state.
    ``segments``: of a state, what the layers run, in order. ``verifying``: of a state, the rows with draft tokens; None
    without any. Where a pass is captured there are no rows on the host.
    """

    starts: npt.NDArray[np.int64]  # [rows]
    counts: npt.NDArray[np.int64]  # [rows]
    pages: npt.NDArray[np.int32]
    page_tokens: int
    cache_index: Tensor | None = None
    plan: Any = None
    segments: tuple[StateSegments, ...] = ()
    verifying: VerifyingRows | None = None

    def run(self, run: StateRun, *inputs: Tensor) -> Tensor:
        """Run the segments of a recurrent layer. -> results of the step's tokens."""
        if self.verifying is not None:
            self.verifying.record(run, inputs)
        return run(inputs, self.segments)

    @classmethod
    def captured(
        cls,
        page_tokens: int,
        cache_index: Tensor | None = None,
        plan: Any = None,
        segments: tuple[StateSegments, ...] = (),
        verifying: VerifyingRows | None = None,
    ) -> BoundedRows:
        """Those of a captured pass: ``cache_index`` and ``plan`` of a window, ``segments`` of a state, which are
        ``verifying`` or decodes."""
        nothing, pages = np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=np.int32)
        return cls(nothing, nothing, pages, page_tokens, cache_index, plan, segments, verifying)


@dataclass(frozen=True)
class ForwardBatch:
    """Tokens of all rows one after the other; decode rows stand first.

    ``plans``: the device's attention plan for each window length that the model's layers have (0: all tokens).
    ``states`` [tokens, width]: what a draft model starts from beside its tokens, or the residual stream that a stage of
    a pipeline has received; None for a whole model.
    ``rows``: the rows on the host; None where a pass is captured. ``bounded``: those of each bounded cache group, by
    its spec.
    """

    token_ids: Tensor  # int [tokens]
    positions: Tensor  # int64 [tokens], index in the sequence
    cache_index: Tensor  # int64 [tokens], page * page_size + offset, where keys and values go
    plans: Mapping[int, Any]
    states: Tensor | None = None
    rows: AttentionRows | None = None
    bounded: Mapping[CacheSpec, BoundedRows] = field(default_factory=dict)

    @property
    def verifying(self) -> tuple[BoundedRows, ...]:
        """The rows of states that are to be brought behind the accepted draft tokens."""
        return tuple(rows for rows in self.bounded.values() if rows.verifying is not None)

    def in_window(self, spec: Window) -> ForwardBatch:
        """The batch as the layers of a window group see it: attention over the group's own pages."""
        rows = self.bounded[spec]
        assert rows.cache_index is not None
        own = None if self.rows is None else AttentionRows(rows.starts, rows.counts, rows.pages, 0)
        return replace(self, cache_index=rows.cache_index, plans={spec.length: rows.plan}, rows=own)
