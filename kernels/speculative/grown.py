"""What is drafted behind a step before the host knows what that accepted, until a step verifies it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.platforms.base import Fetched, Platform
from kernels.platforms.operators import Acceptance
from kernels.platforms.prepared import PassFound
from kernels.sampling import Sampler
from kernels.slots import SlotTable
from kernels.speculative.drafter import Drafter, Drafts
from kernels.speculative.observing import Run
from kernels.speculative.samples import Verified
from kernels.speculative.settings import SpeculativeSettings
from kernels.speculative.tree import DraftTree

__all__ = ["GrownTrees", "rows_of"]

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


@dataclass(eq=False)
class _Grown:
    """Trees drafted behind ``run``, one for each of its rows; ``end``: from what its pass left there, if it is not 0.
    ``roots``: their positions, once the host knows them."""

    run: Run
    tree: DraftTree
    end: int = 0
    roots: Longs | None = None


class GrownTrees:
    """Of one runner."""

    def __init__(
        self, drafter: Drafter, settings: SpeculativeSettings, platform: Platform, sampler: Sampler, slots: SlotTable
    ) -> None:
        self._drafter, self._steps = drafter, settings.num_steps
        self._platform, self._sampler, self._slots = platform, sampler, slots
        self._found: tuple[Tensor, Tensor] | None = None  # the last step's outcome, and what follows each node passed
        self._end = 0  # of a pass that left these; 0: none did
        self._arrives: Fetched | None = None  # what such a pass left last
        self._grown: _Grown | None = None
        self._whole = True  # whether the last trees had all levels

    # -- what a step accepted -----------------------------------------------------------------------------------------

    def found(self, outcome: Tensor, tokens: Tensor) -> None:
        """The ``outcome`` of a step (``Verified.outcome``), and the ``tokens`` that follow each node passed, int64
        [verified rows, levels]."""
        self._found, self._end = (outcome, tokens), 0

    def accepts(self, slots: Longs) -> bool:
        """Whether a pass that verifies what is guessed for the ``slots`` may accept what is right by itself. Waits
        until what the one before has left is on the host."""
        if not self._sampler.plain(tuple(slots.tolist())):
            return False
        if self._arrives is not None:
            self._arrives()
        return True

    def accepted(self, found: PassFound) -> Verified:
        """What a pass left that did, which is brought to the host."""
        assert found.accepted is not None
        self._found, self._end = (found.accepted.outcome, found.accepted.tokens), found.end
        # Only the next pass that accepts overwrites it: on the device it waits (``after_copies``), or ``accepts`` did.
        self._arrives = self._platform.fetch([found.accepted.packed], lasting=True)
        return Verified.by_platform(found.accepted)

    def arrival(self, accepted: Acceptance) -> Fetched:
        """What brings the outcome, the tokens and which are broken of what the last step accepted."""
        begun = self._arrives if self._end else None
        fetched = begun or self._platform.fetch([accepted.packed], lasting=True)

        def arrives() -> list[Tensor]:
            here = accepted.here(fetched()[0])
            return [here.outcome, here.tokens.reshape(-1), here.broken.reshape(-1)]

        return arrives

    # -- what is drafted behind it ------------------------------------------------------------------------------------

    def grow(self, run: Run | None) -> None:
        """Let the drafter go on behind the step that was just given to the device: the next one finds its guesses
        made. Where requests only decode, are greedy and all verify; the others draft when the host knows more.
        """
        found, state, reach = self._found, self._slots, self._drafter.reach()
        self._found = self._grown = None
        if run is None or found is None or not reach or not self._whole or run.features is None:
            return
        step = run.step
        if step.verifies < len(step.rows) or self._sampler.noise(step.slots.tolist()) is not None:
            return
        if (step.starts + reach >= state.page_count[step.slots] * state.page_size).any():
            return
        columns = int(step.starts.max() + reach) // state.page_size + 1
        end = self._end
        tree = self._drafter.draft_behind(end, len(step.slots)) if end else None
        if tree is None:
            end, pages = 0, state.pages[step.slots, :columns]
            tree = self._drafter.draft_ahead(step.starts, step.slots, pages, *found, run.features, step.offsets)
        if tree is not None:
            self._grown = _Grown(run, tree, end)

    def behind(self, slots: Longs, generations: Ints, levels: int) -> tuple[Run, DraftTree] | None:
        """A step that is not settled, and what was drafted behind it from what its pass left; None where that is not
        for just these rows and so many levels, or more than the pass has left is needed to verify it."""
        grown, state = self._grown, self._slots
        if grown is None or grown.roots is not None or not grown.end or 0 < levels < self._steps:
            return None
        if not np.array_equal(slots, grown.run.step.slots):
            return None
        there = state.active[slots] & (state.generation[slots] == generations)
        return (grown.run, grown.tree) if there.all() else None

    def followed(self, run: Run | None, end: int, tree: DraftTree | None) -> None:
        """Behind ``run`` the ``tree`` was drafted, from what its pass left."""
        self._found = None
        self._grown = None if tree is None or run is None else _Grown(run, tree, end)

    def settled(self, run: Run, roots: Longs, rows: Longs) -> bool:
        """The host knows what follows ``run``: positions ``roots`` [rows]; of its ``rows`` requests are there still.
        -> whether the drafter has seen it all, as it went on behind it."""
        grown = self._grown
        if grown is None or grown.run is not run:
            return False
        grown.roots = roots
        self._drafter.observed_ahead(run.step.slots[rows], roots[rows])
        return True

    def drop(self) -> None:
        """Nobody will verify it."""
        self._grown = None

    def ready(self, slots: Longs, roots: Longs, limits: Longs, levels: int) -> Drafts | None:
        """What was drafted ahead, where it is for these rows, and for so many levels: 0 for all that there are."""
        grown, self._whole = self._grown, not levels or levels >= self._steps
        if grown is None or grown.roots is None or not self._whole:
            return None
        run, tree = grown.run, grown.tree
        held = {slot: row for row, slot in enumerate(run.step.slots.tolist())}
        at = np.array([held.get(slot, -1) for slot in slots.tolist()])
        if (at < 0).any() or (grown.roots[at] != roots).any():
            return None
        if (run.generations[at] != self._slots.generation[slots]).any():
            return None
        if len(at) < len(held) or (at[1:] < at[:-1]).any():
            tree = rows_of(tree, self._platform.put(at))
        return Drafts(tree, np.minimum(limits + 1, tree.tokens.shape[1]))


def rows_of(tree: DraftTree, rows: Tensor) -> DraftTree:
    """Of the trees those of ``rows`` int64."""
    return DraftTree(
        tree.tokens.index_select(0, rows),
        tree.parents.index_select(0, rows),
        tree.depths.index_select(0, rows),
        tree.bits.index_select(0, rows),
        tree.linear,
    )
