"""Context parallelism of sparse attention: ranks divide the tokens of a pass with prompts.

The indexer and the attention to chosen tokens take the same time for few heads as for many, so that dividing heads
divides little of it. Here each rank has whole weights of attention, and runs attention and norms for its own tokens;
caches hold all tokens on every rank. Feed-forward layers, which the ranks divide, run all tokens.

A pass is cut into ``2 * size`` blocks; rank r runs blocks r and ``2 * size - 1 - r``, as a token takes more time the
more tokens stand before it (Grattafiori et al., arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.contract.config import CONTEXT_PARALLEL_TOKENS
from kernels.core.attention_rows import AttentionRows
from kernels.core.batch import ForwardBatch
from kernels.core.layer_context import LayerContext
from kernels.core.operators import Linear
from kernels.devices.latent_cache import LatentCache, latent_tensors
from kernels.distributed.group import Group

__all__ = ["ContextParallel", "divide_rows", "divide_tokens"]

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _Division:
    """How a pass is divided. ``own`` int64: indices of this rank's tokens. ``most``: the largest number of tokens of a
    rank. ``places`` int64 [tokens]: the index of each token in the gathered tensor, which has ``most`` tokens for each
    rank. ``cache_index``: of all tokens."""

    own: Tensor
    most: int
    places: Tensor
    cache_index: Tensor


class ContextParallel:
    """The ranks of ``group``, and what this one runs of the current pass. ``put``: copies an array to the device.
    ``plan``: as ``Attention.plan_layers``. All ranks must run the same passes."""

    def __init__(
        self,
        group: Group,
        put: Callable[[npt.NDArray[np.int64]], Tensor],
        plan: Callable[[AttentionRows, int], Any],
    ) -> None:
        self.group, self._put, self._plan = group, put, plan
        self._division: _Division | None = None

    def enter(self, batch: ForwardBatch) -> ForwardBatch:
        """The part of a pass that this rank runs: all of it, if it has few tokens of prompts."""
        self._division, rows, size = None, batch.rows, self.group.size
        if (
            rows is None
            or rows.verifies
            or int(rows.counts.sum()) - rows.decodes < max(CONTEXT_PARALLEL_TOKENS, 2 * size)
        ):
            return batch
        parts = divide_tokens(int(rows.counts.sum()), size)
        most, places = max(map(len, parts)), np.empty(int(rows.counts.sum()), dtype=np.int64)
        for rank, part in enumerate(parts):
            places[part] = rank * most + np.arange(len(part))
        own = self._put(parts[self.group.rank])
        self._division = _Division(own, most, self._put(places), batch.cache_index)
        rows = divide_rows(rows, parts[self.group.rank])
        return replace(
            batch,
            token_ids=batch.token_ids.index_select(0, own),
            positions=batch.positions.index_select(0, own),
            cache_index=batch.cache_index.index_select(0, own),
            plans={window: self._plan(rows, window) for window in batch.plans},
            rows=rows,
        )

    @property
    def own(self) -> Tensor | None:
        """Indices int64 of this rank's tokens of the pass; None: it runs all of them."""
        return None if self._division is None else self._division.own

    def select(self, x: Tensor) -> Tensor:
        """This rank's tokens of ``x`` [tokens, n] -> [own, n]."""
        return x if self._division is None else x.index_select(0, self._division.own)

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' tokens of this rank's ``x`` [own, n], in the order of the pass -> [tokens, n]."""
        division = self._division
        if division is None:
            return x
        if len(x) < division.most:
            x = torch.cat((x, x.new_zeros((division.most - len(x), *x.shape[1:]))))
        return self.group.all_gather_rows(x).index_select(0, division.places)

    def around(self, layer: Linear, rows: LayerContext | None) -> Linear:
        """A divided ``layer`` that runs the tokens of all ranks and returns this rank's tokens. ``rows``: that adapters
        of it read."""

        def run(x: Tensor) -> Tensor:
            with nullcontext() if rows is None else rows.undivided():
                return self.select(layer(self.gather(x)))

        return run

    def share(self, cache: LatentCache) -> None:
        """Write what the other ranks have written of the pass to their ``cache`` to this one."""
        division = self._division
        if division is None:
            return
        for tensor in latent_tensors(cache):
            tokens = tensor.view(-1, tensor.shape[-1])
            own = tokens.index_select(0, division.cache_index.index_select(0, division.own))
            tokens.index_copy_(0, division.cache_index, self.gather(own))

    def take(self, x: Tensor, wanted: Tensor) -> Tensor:
        """The tokens ``wanted`` int64 [rows] of the pass -> [rows, n], on all ranks. ``x`` [own, n]: this rank's."""
        division = self._division
        if division is None:
            return x.index_select(0, wanted)
        places = division.places.index_select(0, wanted)
        mine = torch.div(places, division.most, rounding_mode="floor") == self.group.rank
        found = x.index_select(0, torch.where(mine, places % division.most, 0))
        return self.group.all_reduce(found.masked_fill(~mine.unsqueeze(1), 0))

    def leave(self) -> None:
        """End the division: later layers run the same tokens on all ranks."""
        self._division = None


def divide_tokens(tokens: int, size: int) -> list[Longs]:
    """The tokens that each of ``size`` ranks runs, in ascending order."""
    blocks = np.array_split(np.arange(tokens), 2 * size)
    return [np.concatenate((blocks[rank], blocks[-1 - rank])) for rank in range(size)]


def divide_rows(rows: AttentionRows, own: Longs) -> AttentionRows:
    """The ``rows`` of the tokens ``own`` of a step, in ascending order: a row for each of their runs."""
    ends = np.cumsum(rows.counts)
    row = np.searchsorted(ends, own, side="right")
    begins = np.flatnonzero((np.diff(own, prepend=-2) != 1) | (np.diff(row, prepend=-1) != 0))
    counts, row, first = np.diff(begins, append=len(own)), row[begins], own[begins]
    starts = rows.starts[row] + first - (ends - rows.counts)[row]
    return AttentionRows(starts, counts, rows.pages[row], decodes=0)
