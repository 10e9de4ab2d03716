"""Guesses made right behind a step, before the host knows what it accepted.

Lengths are the device's here: what was accepted is observed, and the next tree is grown, in one pass of static shapes
that reads nothing back, so that a platform may capture it (``Platform.capture_guesses``). The host prepares the next
step while it runs. Where that has other rows than this one, what was observed still counts, and of the trees those of
the rows that are left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.platforms.base import Platform
from kernels.speculative.guesses import Guesses
from kernels.speculative.tree import DraftTree, Growth, chain

__all__ = ["AheadModel", "AheadPasses"]

_ROWS = (1, 2, 4, 8, 16)

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


class AheadModel(Protocol):
    """``expansion.DraftModel``, and how it begins."""

    width: int

    def start(self, features: Tensor) -> Tensor: ...

    def forward(self, batch: ForwardBatch, states: Tensor, caches: list[Any]) -> Tensor: ...

    def logits(self, states: Tensor) -> Tensor: ...


class AheadPasses:
    """One pass for each of a few numbers of rows.

    ``states`` [max_slots, width]: where the state of each slot's last token is kept. ``columns``: pages a sequence may
    have. ``features``: their width. ``nodes``: of a tree, the root counted.
    """

    def __init__(
        self,
        model: AheadModel,
        guesses: Guesses,
        platform: Platform,
        caches: list[Any],
        states: Tensor,
        windows: list[int],
        page_size: int,
        columns: int,
        features: int,
        steps: int,
        topk: int,
        nodes: int,
        first: int,
    ) -> None:
        self.steps, self.first = steps, first
        self._model, self._guesses, self._platform, self._caches = model, guesses, platform, caches
        self._states, self._windows, self._page_size = states, windows, page_size
        self._topk, self._nodes = topk, nodes
        most, levels, device = max(_ROWS), steps + 1, states.device
        self._host = torch.zeros((most, 2 + columns), dtype=torch.int64, device=device)  # roots, slots, pages
        self._outcome = torch.zeros((most, 2 + levels), dtype=torch.int64, device=device)
        self._tokens = torch.zeros((most, levels), dtype=torch.int64, device=device)
        self._features = torch.zeros((most * levels, features), dtype=states.dtype, device=device)
        self._passes: dict[int, tuple[Callable[[], None], list[DraftTree]]] = {}

    def capture(self, rows: int, agree: Callable[[bool], bool]) -> None:
        """Prepare passes of up to ``rows`` rows, as many as the platform can."""
        for size in sorted((size for size in _ROWS if size <= rows), reverse=True):
            found: list[DraftTree] = []

            def run(size: int = size, found: list[DraftTree] = found) -> None:
                found[:] = [self._run(size)]

            captured = self._platform.capture_guesses(run)
            if not agree(captured is not None) or captured is None:
                return
            self._passes[size] = captured, found

    @property
    def reach(self) -> int:
        """Positions behind the root that a pass writes to at most."""
        return self.steps + 1 + self.first + self._topk * (self.steps - 1)

    def size(self, rows: int) -> int:
        """Of the pass that runs ``rows`` rows; 0: none does."""
        return min((size for size in self._passes if size >= rows), default=0)

    def run(
        self, roots: Longs, slots: Longs, pages: Ints, outcome: Tensor, tokens: Tensor, features: Tensor, places: Longs
    ) -> DraftTree:
        """Observe what rows accepted, and grow trees behind it; they are overwritten by the next call.

        ``roots`` [rows]: positions that were verified from. ``outcome``: ``Verified.outcome``. ``tokens`` int64 [rows,
        levels or less]: what follows each node passed. ``features`` [tokens, n] of the step, of which a row's begin at
        ``places``.
        """
        rows = len(roots)
        size = self.size(rows)
        host = np.zeros((size, self._host.shape[1]), dtype=np.int64)
        host[:rows, 0], host[:rows, 1], host[:rows, 2 : 2 + pages.shape[1]] = roots, slots, pages
        put = self._platform.put
        self._host[:size].copy_(put(host))
        self._outcome[:size].zero_()
        self._outcome[:rows, : outcome.shape[1]].copy_(outcome)
        self._tokens[:rows, : tokens.shape[1]].copy_(tokens)
        at = (self._outcome[:rows, 2:] + put(places).unsqueeze(1)).reshape(-1)
        self._features[: len(at)].copy_(features.index_select(0, at))
        replay, found = self._passes[size]
        replay()
        tree = found[0]
        return DraftTree(tree.tokens[:rows], tree.parents[:rows], tree.depths[:rows], tree.bits[:rows], tree.linear)

    def _run(self, rows: int) -> DraftTree:
        model, levels, device = self._model, self.steps + 1, self._states.device
        roots, slots, pages = self._host[:rows, 0], self._host[:rows, 1], self._host[:rows, 2:]
        outcome, tokens = self._outcome[:rows], self._tokens[:rows]
        counts = outcome[:, 0].abs().clamp(min=1)
        level = torch.arange(levels, device=device)
        positions = roots.unsqueeze(1) + level
        # What was not accepted is written to the dump page; a row that is not finite leaves nothing behind.
        index = torch.where(level < counts.unsqueeze(1), self._places(pages, positions), level % self._page_size)
        sound = (outcome[:, :1] > 0).unsqueeze(2)
        features = self._features[: rows * levels]
        features = torch.where(sound, features.view(rows, levels, -1), 0).view(rows * levels, -1)
        plans = self._plans(roots, pages, levels, None, None)
        batch = ForwardBatch(tokens.reshape(-1), positions.reshape(-1), index.reshape(-1), plans)
        seen = model.forward(batch, model.start(features), self._caches)
        last = (counts - 1).unsqueeze(1)
        states = seen.view(rows, levels, -1).gather(1, last.unsqueeze(2).expand(-1, -1, seen.shape[1])).squeeze(1)
        self._states.index_copy_(0, slots, states)
        root_tokens = tokens.gather(1, last).squeeze(1)
        grow = self._chain if self._topk == 1 else self._tree
        return grow(roots + counts + self.first, root_tokens, pages, states)

    def _chain(self, begins: Tensor, root_tokens: Tensor, pages: Tensor, states: Tensor) -> DraftTree:
        best = self._guesses.best
        tokens = [root_tokens, best(self._model.logits(states), None, begins, 1)]
        for step in range(1, self.steps):
            at = begins + (step - 1)
            index = self._places(pages, at.unsqueeze(1)).view(-1)
            batch = ForwardBatch(tokens[-1], at, index, self._plans(at, pages, 1, None, None))
            states = self._model.forward(batch, states, self._caches)
            tokens.append(best(self._model.logits(states), None, begins, 1 + step))
        return chain(torch.stack(tokens, 1))

    def _tree(self, begins: Tensor, root_tokens: Tensor, pages: Tensor, states: Tensor) -> DraftTree:
        rows, width, device = len(begins), self._topk, begins.device
        own = torch.ones((), dtype=torch.int64, device=device) << torch.arange(width, device=device)
        row = torch.arange(rows, device=device).unsqueeze(1)
        node = torch.arange(width, device=device)
        growth = Growth(root_tokens, width)
        tokens, scores = self._guesses.candidates(self._model.logits(states), None, begins, 1, width)
        level = growth.grow(tokens.unsqueeze(1), scores.unsqueeze(1))
        seen = own.expand(rows, width)
        for step in range(1, self.steps):
            above = 1 if step == 1 else width
            states = states.index_select(0, (row * above + level.origins).view(-1))
            starts = begins + width * (step - 1)
            index = self._places(pages, starts.unsqueeze(1) + node).view(-1)
            positions = (begins + (step - 1)).repeat_interleave(width, output_size=rows * width)
            plans = self._plans(starts, pages, width, seen, begins)
            batch = ForwardBatch(level.tokens.reshape(-1), positions, index, plans)
            states = self._model.forward(batch, states, self._caches)
            tokens, scores = self._guesses.candidates(self._model.logits(states), None, begins, 1 + step, width)
            level = growth.grow(tokens.view(rows, width, -1), scores.view(rows, width, -1))
            seen = seen.gather(1, level.origins) | (own << (step * width))
        return growth.tree(min(self._nodes, growth.candidates + 1))

    def _places(self, pages: Tensor, positions: Tensor) -> Tensor:
        """Where int64 [rows, n] ``positions`` lie in the cache."""
        size = self._page_size
        return pages.gather(1, positions // size) * size + positions % size

    def _plans(
        self, starts: Tensor, pages: Tensor, tokens: int, bits: Tensor | None, roots: Tensor | None
    ) -> dict[int, Any]:
        return {
            window: self._platform.plan_guesses(starts, pages, tokens, bits, roots, window) for window in self._windows
        }
