"""What stands between a draft's passes when guesses are made ahead: places, plans, the choice of nodes.

Here in plain torch, for any device and as the reference; a platform may have kernels of its own
(``Platform.make_growing``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.speculative.guesses import Guesses
from kernels.speculative.tree import DraftTree, Growth, Level, chain

__all__ = ["Accepted", "Growing", "GrowthShape", "PlanGuesses", "TorchGrowing"]

PlanGuesses = Callable[[Tensor, Tensor, int, Tensor | None, Tensor | None, int], Any]
"""``Platform.plan_guesses``."""


@dataclass(frozen=True)
class GrowthShape:
    """``steps`` levels of ``topk`` nodes each, of which ``nodes``, the root counted, are verified. ``first``: as
    ``Expansion`` says. ``windows``: of the draft's attention. ``ids`` int64: the target's of the draft's tokens."""

    steps: int
    topk: int
    nodes: int
    first: int
    page_size: int
    windows: tuple[int, ...]
    ids: Tensor | None

    @property
    def candidates(self) -> int:
        """Nodes that are seen, the root not counted."""
        return self.topk + (self.steps - 1) * self.topk * self.topk

    @property
    def kept(self) -> int:
        """Nodes of a tree, the root counted."""
        return self.steps + 1 if self.topk == 1 else min(self.nodes, self.candidates + 1)


@dataclass(frozen=True)
class Accepted:
    """What rows verified, on the device, in places that are always the same.

    ``roots``, ``slots`` int64 [rows] and ``pages`` int64 [rows, columns]: of the verified roots. ``outcome`` int64
    [rows, 2 + levels]: ``Verified.outcome``. ``tokens`` int64 [rows, levels]: what follows each node passed.
    ``features`` [rows * levels, n]: of these nodes; those of rows that are not sound may be overwritten. ``states``
    [slots, width]: those of the slots' last tokens are written there.
    """

    roots: Tensor
    slots: Tensor
    pages: Tensor
    outcome: Tensor
    tokens: Tensor
    features: Tensor
    states: Tensor


class Growing(Protocol):
    """One pass: ``observe`` and ``start``, then ``level`` for each level but the last, then ``tree``."""

    def observe(self) -> ForwardBatch:
        """What was accepted, with the features in place of states; what was not goes to the dump page."""
        ...

    def start(self, seen: Tensor) -> Tensor:
        """``seen`` [rows * levels, width], what the observed tokens left -> of the last ones [rows, width]."""
        ...

    def level(self, logits: Tensor, states: Tensor) -> ForwardBatch:
        """The nodes that follow those that left ``states`` and have the ``logits``, with the states they go on from."""
        ...

    def tree(self, logits: Tensor) -> DraftTree:
        """The best nodes of all, with those that follow the last level."""
        ...


class TorchGrowing:
    """With torch's operators."""

    def __init__(self, shape: GrowthShape, given: Accepted, plan: PlanGuesses, guesses: Guesses) -> None:
        self._shape, self._given, self._plan, self._guesses = shape, given, plan, guesses
        self._step = 0

    def observe(self) -> ForwardBatch:
        shape, given = self._shape, self._given
        rows, levels = given.tokens.shape
        self._counts = given.outcome[:, 0].abs().clamp(min=1)
        level = torch.arange(levels, device=given.tokens.device)
        positions = given.roots.unsqueeze(1) + level
        index = torch.where(
            level < self._counts.unsqueeze(1), self._places(positions), level % shape.page_size
        )  # a row that is not finite leaves nothing behind
        sound = (given.outcome[:, :1] > 0).unsqueeze(2)
        features = torch.where(sound, given.features.view(rows, levels, -1), 0).view(rows * levels, -1)
        plans = self._plans(given.roots, levels, None, None)
        return ForwardBatch(given.tokens.reshape(-1), positions.reshape(-1), index.reshape(-1), plans, features)

    def start(self, seen: Tensor) -> Tensor:
        given = self._given
        rows, levels = given.tokens.shape
        last = (self._counts - 1).unsqueeze(1)
        states = seen.view(rows, levels, -1).gather(1, last.unsqueeze(2).expand(-1, -1, seen.shape[1])).squeeze(1)
        given.states.index_copy_(0, given.slots, states)
        root_tokens = given.tokens.gather(1, last).squeeze(1)
        self._begins = given.roots + self._counts + self._shape.first
        self._tokens = [root_tokens]
        self._growth = Growth(root_tokens, self._shape.topk)
        return states

    def level(self, logits: Tensor, states: Tensor) -> ForwardBatch:
        self._step += 1
        return self._link(logits, states) if self._shape.topk == 1 else self._branches(logits, states)

    def _link(self, logits: Tensor, states: Tensor) -> ForwardBatch:
        self._tokens.append(self._guesses.best(logits, None, self._begins, self._step))
        at = self._begins + (self._step - 1)
        index = self._places(at.unsqueeze(1)).view(-1)
        return ForwardBatch(self._tokens[-1], at, index, self._plans(at, 1, None, None), states)

    def _branches(self, logits: Tensor, states: Tensor) -> ForwardBatch:
        rows, width, step, device = len(self._begins), self._shape.topk, self._step, logits.device
        node = torch.arange(width, device=device)
        own = torch.ones((), dtype=torch.int64, device=device) << (node + (step - 1) * width)
        level = self._grow(logits)
        above = 1 if step == 1 else width
        row = torch.arange(rows, device=device).unsqueeze(1)
        states = states.index_select(0, (row * above + level.origins).view(-1))
        self._seen = own.expand(rows, width) if step == 1 else self._seen.gather(1, level.origins) | own
        starts = self._begins + width * (step - 1)
        index = self._places(starts.unsqueeze(1) + node).view(-1)
        positions = (self._begins + (step - 1)).repeat_interleave(width, output_size=rows * width)
        plans = self._plans(starts, width, self._seen, self._begins)
        return ForwardBatch(level.tokens.reshape(-1), positions, index, plans, states)

    def _grow(self, logits: Tensor) -> Level:
        rows, width = len(self._begins), self._shape.topk
        tokens, scores = self._guesses.candidates(logits, None, self._begins, 0, width)
        return self._growth.grow(tokens.view(rows, -1, width), scores.view(rows, -1, width))

    def tree(self, logits: Tensor) -> DraftTree:
        if self._shape.topk == 1:
            best = self._guesses.best(logits, None, self._begins, self._step + 1)
            return chain(torch.stack([*self._tokens, best], 1))
        self._grow(logits)
        return self._growth.tree(self._shape.kept)

    def _places(self, positions: Tensor) -> Tensor:
        """Where int64 [rows, n] ``positions`` lie in the cache."""
        size = self._shape.page_size
        return self._given.pages.gather(1, positions // size) * size + positions % size

    def _plans(self, starts: Tensor, tokens: int, bits: Tensor | None, roots: Tensor | None) -> dict[int, Any]:
        pages = self._given.pages
        return {window: self._plan(starts, pages, tokens, bits, roots, window) for window in self._shape.windows}
