"""Guesses made right behind a step, before the host knows what it accepted.

Lengths are the device's here: what was accepted is observed, and the next tree is grown, in one pass of static shapes
that reads nothing back, so that a platform may capture it (``Platform.capture_guesses``). The host prepares the next
step while it runs. Where that has other rows than this one, what was observed still counts, and of the trees those of
the rows that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.platforms.base import Platform
from kernels.platforms.prepared import PassEnd
from kernels.speculative.growing import Accepted, Growing, GrowthShape, TorchGrowing
from kernels.speculative.guesses import Guesses
from kernels.speculative.tree import DraftTree

__all__ = ["AheadModel", "AheadPasses"]

_ROWS = (1, 2, 4, 8, 16)

_Passes = dict[int, tuple[Callable[[], None], list[DraftTree]]]
"""By the number of rows: what runs one, and the trees that it leaves."""

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
    have. ``features``: their width.
    """

    def __init__(
        self,
        model: AheadModel,
        guesses: Guesses,
        platform: Platform,
        caches: list[Any],
        states: Tensor,
        columns: int,
        features: int,
        shape: GrowthShape,
    ) -> None:
        self._model, self._guesses, self._platform, self._caches = model, guesses, platform, caches
        self._states, self._shape = states, shape
        most, levels, device = max(_ROWS), shape.steps + 1, states.device
        self._host = torch.zeros((most, 2 + columns), dtype=torch.int64, device=device)  # roots, slots, pages
        self._outcome = torch.zeros((most, 2 + levels), dtype=torch.int64, device=device)
        self._tokens = torch.zeros((most, levels), dtype=torch.int64, device=device)
        self._features = torch.zeros((most * levels, features), dtype=states.dtype, device=device)
        self._passes: _Passes = {}
        self._behind: _Passes = {}

    def capture(self, rows: int, agree: Callable[[bool], bool], ends: Mapping[int, PassEnd]) -> None:
        """Prepare passes of up to ``rows`` rows, as many as the platform can, and those behind ``ends``."""
        for size in sorted((size for size in _ROWS if size <= rows), reverse=True):
            if not self._capture(self._passes, size, partial(self._run, size), agree):
                break
        if not self._passes:
            return
        for size, end in ends.items():
            if size <= rows and not self._capture(self._behind, size, partial(self._run_behind, end), agree):
                break
        # So that no step waits for its kernel to be made.
        nothing = self._host.new_zeros((1, 2 + self._host.shape[1]))
        outcome, tokens = torch.zeros_like(self._outcome[:1]), torch.zeros_like(self._tokens[:1])
        self._bring(nothing[:, :4], nothing[:, 4:], outcome, tokens, torch.zeros_like(self._features))

    def _capture(self, passes: _Passes, size: int, run: Callable[[], DraftTree], agree: Callable[[bool], bool]) -> bool:
        found: list[DraftTree] = []

        def hold() -> None:
            found[:] = [run()]

        captured = self._platform.capture_guesses(hold)
        if not agree(captured is not None) or captured is None:
            return False
        passes[size] = captured, found
        return True

    @property
    def reach(self) -> int:
        """Positions behind the root that a pass writes to at most."""
        shape = self._shape
        return shape.steps + 1 + shape.first + shape.topk * (shape.steps - 1)

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
        columns, show = self._host.shape[1], self._platform.show
        host = np.zeros((size, 2 + columns), dtype=np.int64)
        host[:rows, 0], host[:rows, 1], host[:rows, 3] = slots, roots, places
        host[:rows, 4 : 4 + pages.shape[1]] = pages
        given = show(host)
        self._bring(given[:, :4], given[:, 4:], outcome, tokens, features)
        return self._replay(self._passes[size], rows)

    def follow(self, end: int, rows: int) -> DraftTree | None:
        """The same behind a pass that has left what it accepted, of its first ``rows`` rows; None where no pass was
        prepared behind it, and nothing was done."""
        return self._replay(self._behind[end], rows) if end in self._behind else None

    @staticmethod
    def _replay(captured: tuple[Callable[[], None], list[DraftTree]], rows: int) -> DraftTree:
        replay, found = captured
        replay()
        tree = found[0]
        return DraftTree(tree.tokens[:rows], tree.parents[:rows], tree.depths[:rows], tree.bits[:rows], tree.linear)

    def _bring(self, given: Tensor, pages: Tensor, outcome: Tensor, tokens: Tensor, features: Tensor) -> None:
        """Put what rows accepted to where a pass finds it, as ``Platform.bring_accepted`` does."""
        size, rows, columns = len(given), len(outcome), min(self._host.shape[1] - 2, pages.shape[1])
        if self._platform.bring_accepted(
            given, pages, outcome, tokens, features, self._host[:size], self._outcome, self._tokens, self._features
        ):
            return
        self._host[:size].zero_()
        self._host[:size, 0], self._host[:size, 1] = given[:, 1], given[:, 0]
        self._host[:size, 2 : 2 + columns].copy_(pages[:, :columns])
        self._outcome[:size].zero_()
        self._outcome[:rows, : outcome.shape[1]].copy_(outcome)
        self._tokens[:rows, : tokens.shape[1]].copy_(tokens)
        at = (self._outcome[:rows, 2:] + given[:rows, 3:4]).reshape(-1)
        self._features[: len(at)].copy_(features.index_select(0, at))

    def _run_behind(self, end: PassEnd) -> DraftTree:
        self._bring(end.rows, end.pages, end.accepted.outcome, end.accepted.tokens, end.features)
        return self._run(len(end.rows))

    def _run(self, rows: int) -> DraftTree:
        model, levels, caches = self._model, self._shape.steps + 1, self._caches
        given = Accepted(
            self._host[:rows, 0],
            self._host[:rows, 1],
            self._host[:rows, 2:],
            self._outcome[:rows],
            self._tokens[:rows],
            self._features[: rows * levels],
            self._states,
        )
        growing = self._make(given)
        batch = growing.observe()
        assert batch.states is not None
        states = growing.start(model.forward(batch, model.start(batch.states), caches))
        for _ in range(self._shape.steps - 1):
            batch = growing.level(model.logits(states), states)
            assert batch.states is not None
            states = model.forward(batch, batch.states, caches)
        return growing.tree(model.logits(states))

    def _make(self, given: Accepted) -> Growing:
        own = self._platform.make_growing(self._shape, given)
        return own or TorchGrowing(self._shape, given, self._platform.plan_guesses, self._guesses)
