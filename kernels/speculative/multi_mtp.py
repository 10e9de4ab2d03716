"""Several heads for tokens after the next, each run once a draft: head k guesses the token k + 2 positions on.

Head k joins the state that head k - 1 left at position i (head 0: the target's feature) with the token at position
i + k + 1, so its last k positions wait for tokens that are not known yet. A draft runs them with what the heads before
guessed; the next observation runs them again with what is known by then (DeepSeek-V3, arXiv 2412.19437, section 2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.models.config import ConfigError
from kernels.platforms.rows import AttentionRows
from kernels.speculative.drafter import Drafter, DrafterContext, DraftRows, Drafts, Observation
from kernels.speculative.expansion import observed_rows
from kernels.speculative.guesses import Guesses
from kernels.speculative.heads import HeadModel
from kernels.speculative.tree import chain
from kernels.step import Admission

__all__ = ["MultiHeads"]

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


class MultiHeads(Drafter):
    """Chains of a guess a head. Of each slot the features and the first head's states of the last few positions are
    kept: as many as there are heads.
    """

    features = True
    stepwise = True

    def __init__(self, context: DrafterContext, heads: Sequence[HeadModel]) -> None:
        if context.settings.topk > 1:
            raise ConfigError("several heads draft a chain: use --speculative-eagle-topk 1 with them")
        self._context, self._heads = context, heads
        self._guesses = Guesses(heads[0].ids, context.platform.greedy)
        self._kept = len(heads)
        self._caches: list[Any] = []
        config, slots = heads[0].config, context.config.max_slots
        self.cache_bytes = len(heads) * context.platform.cache_bytes(config.kv_heads, config.head_dim, context.dtype)
        self.depth, self.most_nodes = self._kept, min(self._kept + 1, context.settings.num_draft_tokens)
        shape = (slots * self._kept, config.hidden_size)
        self._features = torch.zeros(shape, dtype=context.dtype, device=context.platform.device)
        self._states = torch.zeros_like(self._features)
        self._held: Longs = np.zeros(slots, dtype=np.int64)  # positions of which these are kept ...
        self._next: Longs = np.zeros(slots, dtype=np.int64)  # ... those before this one

    def make_caches(self, pages: int) -> list[Any]:
        config, context = self._heads[0].config, self._context
        self._caches = context.platform.make_cache(
            self._kept, pages, context.config.page_size, config.kv_heads, config.head_dim, context.dtype
        )
        return self._caches

    def admit(self, admission: Admission, tokens: Ints) -> None:
        self._held[admission.slot] = 0

    def observe(self, seen: Observation) -> None:
        assert seen.features is not None, "made from features"
        # The positions before, whose tokens were not all known, are run again where their features are kept.
        again = np.where(self._next[seen.slots] == seen.starts, np.minimum(self._held[seen.slots], self._kept - 1), 0)
        starts, counts = seen.starts - again, seen.counts + again
        rows = np.repeat(np.arange(len(starts)), counts)
        place = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)  # in its row
        positions = starts[rows] + place
        new = np.cumsum(seen.counts) - seen.counts
        kept = seen.slots[rows] * self._kept + self._kept - again[rows] + place
        count = len(self._features)
        source = np.where(place < again[rows], kept, count + new[rows] + place - again[rows])
        features = torch.cat((self._features, seen.features)).index_select(0, self._put(source))
        table, at = seen.table.view(-1), self._after(seen.slots[rows], positions, seen.table)
        index = self._index(rows, positions, seen.pages)
        plans = self._plans(observed_rows(starts, counts, seen.pages))
        last = np.cumsum(counts) - 1
        behind = np.arange(self._kept) - self._kept + 1
        keep = self._put(np.maximum(last[:, None] + behind, (last - counts + 1)[:, None]).reshape(-1))
        into = self._put((seen.slots[:, None] * self._kept + np.arange(self._kept)).reshape(-1))
        self._features.index_copy_(0, into, features.index_select(0, keep))
        states = features
        for number, (head, cache) in enumerate(zip(self._heads, self._caches, strict=True)):
            batch = ForwardBatch(table[(at + number).clamp(max=len(table) - 1)], self._put(positions), index, plans)
            states = head.forward(batch, states, [cache])
            if number == 0:
                self._states.index_copy_(0, into, states.index_select(0, keep))
        self._held[seen.slots] = np.minimum(counts, self._kept)
        self._next[seen.slots] = seen.starts + seen.counts

    def draft(self, rows: DraftRows) -> Drafts:
        steps = max(1, min(rows.steps, self._kept, int(rows.limits.max())))
        known = (self._held[rows.slots] > 0) & (self._next[rows.slots] == rows.roots)
        counts = np.where(known, np.minimum(self._held[rows.slots], self._kept), 1)  # what is not known runs nowhere
        starts = np.maximum(rows.roots - counts, 0)
        row = np.repeat(np.arange(len(starts)), counts)
        place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        positions = starts[row] + place
        last = self._put(np.cumsum(counts) - 1)
        kept = rows.slots[row] * self._kept + self._kept - counts[row] + place
        states = self._states.index_select(0, self._put(kept))
        index = self._index(row, positions, np.where(known[:, None], rows.pages, 0))
        plans = self._plans(AttentionRows(starts, counts, rows.pages, 0, len(starts)))
        table, at = rows.table.view(-1), self._after(rows.slots[row], positions, rows.table)
        # Behind the known tokens of a row stand its guesses: of those that head k reads, the last k.
        beyond = self._put(positions - rows.roots[row])
        which = self._put(row * (self._kept + 1))
        tokens = torch.zeros((len(starts), self._kept + 1), dtype=torch.int64, device=states.device)
        tokens[:, 0] = rows.root_tokens
        at_positions = self._put(positions)
        for step in range(steps):
            if step:
                ahead = beyond + (step + 1)  # how far behind the root the token stands that is read
                guesses = tokens.view(-1)[which + ahead.clamp(min=0)]
                given = table[(at + step).clamp(max=len(table) - 1)].to(torch.int64)
                read = torch.where(ahead > 0, guesses, given)
                states = self._heads[step].forward(
                    ForwardBatch(read, at_positions, index, plans), states, [self._caches[step]]
                )
            logits = self._heads[step].logits(states.index_select(0, last))
            tokens[:, step + 1] = self._guesses.best(logits, rows.noise, rows.root_positions, 1 + step)
        nodes = np.where(known, np.minimum(rows.limits, min(steps, self.most_nodes - 1)), 0) + 1
        return Drafts(chain(tokens[:, : steps + 1]), nodes)

    def _put(self, array: Longs) -> Tensor:
        return self._context.platform.put(np.ascontiguousarray(array))

    def _after(self, slots: Longs, positions: Longs, table: Tensor) -> Tensor:
        """Where in the table, seen as one row, the tokens after ``positions`` stand. What heads read behind a slot's
        last known token is of no meaning, and run again when it is known."""
        return self._put(slots * table.shape[1] + positions + 1)

    def _index(self, rows: Longs, positions: Longs, pages: Ints) -> Tensor:
        page_size = self._context.config.page_size
        return self._put(pages[rows, positions // page_size] * np.int64(page_size) + positions % page_size)

    def _plans(self, rows: AttentionRows) -> dict[int, Any]:
        return {0: self._context.platform.plan_attention(rows, 0)}
