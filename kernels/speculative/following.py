"""Passes that are given to the device before the host knows what those before them accepted.

A pass that accepts by itself leaves the lengths of its rows where the next one finds them, and its guesses are made
behind it. While the rows stay the same, and have pages for whatever is accepted, nothing that another pass needs is
known to the host alone. So that is issued first, its drafting behind it, and only then is the one before settled: the
device never waits for the host between two passes, nor between a pass and its guesses.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.platforms.base import Platform
from kernels.platforms.prepared import Decodes, PassFound
from kernels.rows import StepRows
from kernels.slots import SlotTable
from kernels.speculative.drafter import Drafts
from kernels.speculative.samples import Verified
from kernels.speculative.speculator import Speculator
from kernels.speculative.tree import DraftTree
from kernels.step import StepBatch

__all__ = ["Followed", "Following"]

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


class Followed(NamedTuple):
    """A pass of ``slots`` int64 [rows] that was given to the device: what it ``found``, and the same as ``verified``;
    the trees that it verifies, one of each row (``tree``), and those that were drafted ``behind`` it, if any were."""

    slots: Longs
    found: PassFound
    verified: Verified
    tree: DraftTree
    behind: DraftTree | None


class Following:
    """Of one runner. ``prepared``: passes that verify, some of which accept."""

    def __init__(self, speculator: Speculator, platform: Platform, slots: SlotTable, prepared: Decodes) -> None:
        self._speculator, self._platform, self._slots, self._prepared = speculator, platform, slots, prepared

    def may(self, batch: StepBatch) -> bool:
        """Whether it may be such a step, as far as can be told at a glance: nothing but decodes that guess and grants
        is in it."""
        if not batch.drafts or batch.admitted or batch.released:
            return False
        if not len(batch.drafts) == len(batch.slots) == len(batch.generations):
            return False
        return bool(batch.counts == np.ones(len(batch.slots) // 4, dtype=np.int32).tobytes())

    def issue(self, batch: StepBatch) -> Followed | None:
        """Run the pass behind the one that is not settled yet, and draft behind it. None where it has to wait for the
        host: then nothing was done."""
        slots, generations, most = (
            np.frombuffer(part, dtype=np.int32) for part in (batch.slots, batch.generations, batch.drafts)
        )
        at, speculator, state = slots.astype(np.int64), self._speculator, self._slots
        held = speculator.trees.behind(at, generations, batch.levels)
        if held is None or self._prepared.verify is None:
            return None
        run, tree = held
        width, reach = tree.tokens.shape[1], speculator.drafter.reach()
        guesses = min(speculator.drafter.depth, width - 1)  # that the run accepts, at most
        starts: Longs = run.step.starts + guesses + 1
        ends = starts + max(width, reach + 1)
        if (most < width - 1).any() or (ends > state.page_count[at] * state.page_size).any():
            return None
        if (starts + 1 >= state.longest).any() or (state.left(at) <= guesses + 2).any():
            return None
        pages = state.pages[at, : int(ends.max() - 1) // state.page_size + 1]
        self._platform.after_copies()
        found = self._prepared.verify(None, pages, tree, at)
        if found is None:
            return None
        verified = speculator.trees.accepted(found)
        behind = speculator.drafter.draft_behind(found.end, len(at))
        return Followed(at, found, verified, tree, behind)

    def settle(self, followed: Followed) -> StepRows:
        """Wait for what was accepted before. -> the rows of the pass that was issued behind it, whose places are known
        now."""
        self._speculator.settle(True, False)
        slots = followed.slots
        rows, ones = np.arange(len(slots)), np.ones(len(slots), dtype=np.int64)
        nodes = ones * followed.tree.tokens.shape[1]
        return StepRows(rows, slots, ones, self._slots).with_drafts(rows, Drafts(followed.tree, nodes))
