"""Steps of nothing but decodes whose logits nothing edits, some of which verify guesses, where the device is the host.

As ``kernels.steady`` does for plain decodes: one call drafts or verifies, and what is around it is numpy's. What such a
step accepts is known at once; the drafter observes it before the next step, as always.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kernels.host_target import HostTarget
from kernels.platforms.base import Platform
from kernels.platforms.operators import Draws
from kernels.platforms.prepared import GuessCycle
from kernels.platforms.rows import DecodeTokens
from kernels.rows import ragged
from kernels.sampling import Sampler
from kernels.slots import SlotTable
from kernels.speculative.drafter import Drafter
from kernels.speculative.host_drafts import GuessesHere, HostDrafts, SeenHere, places_of
from kernels.speculative.speculator import Speculator
from kernels.step import StepBatch

__all__ = ["Chained", "SteadyChains"]

_ONE = np.ones(1, dtype=np.int32).tobytes()

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


class Chained(NamedTuple):
    """``tokens`` int32 [accepted]: all rows', one after the other. ``accepted``, ``drafted`` (guesses verified) and
    ``depths`` (as in ``StepResult``) int32 [rows]. ``drafted_at``: ``time.perf_counter`` when they were drafted."""

    tokens: bytes
    accepted: bytes
    drafted: bytes
    depths: bytes
    drafted_at: float

    @property
    def idle(self) -> bool:
        """Whether there was nothing to guess, and nothing was done."""
        return not self.accepted


class SteadyChains:
    """For up to ``max_rows`` rows. ``steps``: levels that are drafted."""

    def __init__(
        self,
        platform: Platform,
        state: SlotTable,
        sampler: Sampler,
        speculator: Speculator,
        drafts: HostDrafts,
        target: HostTarget,
        caches: list[object],
        max_rows: int,
        steps: int,
    ) -> None:
        self._platform, self._state, self._sampler, self._speculator = platform, state, sampler, speculator
        self._drafts, self._target, self._caches, self._max_rows, self._steps = drafts, target, caches, max_rows, steps
        drafter = speculator.drafter
        self._depth, self._most, self._linear = drafter.depth, drafter.most_nodes - 1, not drafter.branches
        self._verify = target.run.verify(state.table, target.logits, target.tokens, target.broken)
        self._cycle = drafts.cycle(target)
        self._rows: tuple[bytes, bytes] | None = None  # slots and generations that were found fit
        self._slots: Longs = np.zeros(0, dtype=np.int64)
        self._draws: Draws | None = None
        # Of these rows: tokens that they know, have pages for, and are still to have.
        self._known = self._room = self._left = self._slots
        self._judges = type(drafter).judged is not Drafter.judged

    def again(self, batch: StepBatch) -> bool:
        """Whether its rows are those that fitted last, and but for grants nothing else is in it."""
        return (
            self._rows == (batch.slots, batch.generations)
            and batch.counts == _ONE * len(self._slots)
            and len(batch.drafts) == len(batch.slots)
            and not (batch.admitted or batch.released)
        )

    @property
    def follows(self) -> bool:
        """Whether another step of the rows that fitted last shows the drafter itself all that it has to see; it is not
        over with them then."""
        return self._cycle is not None and self._speculator.follows(self._slots)

    def fits(self, batch: StepBatch) -> bool:
        """Whether its rows, releases, admissions and grants done, are such."""
        rows = len(batch.slots) // 4
        if batch.counts != _ONE * rows or len(batch.drafts) != len(batch.slots) or not 0 < rows <= self._max_rows:
            return False
        state = self._state
        if self._rows != (batch.slots, batch.generations):
            slots = np.frombuffer(batch.slots, dtype=np.int32)
            generations, counts = (np.frombuffer(part, dtype=np.int32) for part in (batch.generations, batch.counts))
            named = tuple(slots.tolist())
            if state.errors(slots, generations, counts) or not self._sampler.raced(named):
                return False
            draws, at = self._sampler.draws(named), slots.astype(np.int64)
            if (draws is not None and self._target.draw is None) or not self._speculator.wanted(at):
                return False
            self._draws, self._slots, self._rows = draws, at, (batch.slots, batch.generations)
        return self.goes_on()

    def goes_on(self) -> bool:
        """Whether the rows that fitted last have another such step before them, as far as that can change."""
        if self._cycle is not None:  # which looks for itself
            return True
        state, slots = self._state, self._slots
        self._known = known = state.known[slots]
        self._room = room = state.page_count[slots] * state.page_size
        fits = (state.computed[slots] + 1 == known) & (known <= room) & (known < state.longest)
        return bool(fits.all())

    def over(self) -> bool:
        """Whether the sequences of the rows that fitted are at their end, all of them: what comes of the step is of no
        use. To be asked before ``run``, unless it ``follows``."""
        self._left = self._state.left(self._slots)
        return not self._left.any()

    def run(self, batch: StepBatch) -> Chained | None:
        """Draft and verify. None where that is not for this, or a row is not finite: then nothing was done that is not
        done again.

        The rows go on, and it is not over with them: both were just asked."""
        if self._cycle is not None:
            return self._run_cycle(self._cycle, batch)
        trees = self._draft(batch)
        return None if trees is None else self._verify_trees(batch, trees)

    def _run_cycle(self, cycle: GuessCycle, batch: StepBatch) -> Chained | None:
        steps, speculator = min(batch.levels or self._steps, self._steps), self._speculator
        unseen = speculator.follows(self._slots)
        left = None if unseen else self._left
        found, seen = cycle(self._slots, batch.drafts, left, steps, self._draws, unseen)
        if seen:
            speculator.saw()
        if found is None:
            return None
        if found.told:
            features = self._target.features if speculator.drafter.features else None
            shown = SeenHere(self._slots, found.roots, found.accepted, features, found.places)
            self._show(batch, shown, found.depths, not found.over)
        return Chained(found.tokens, found.told, found.drafted, found.depths, found.drafted_at)

    def _show(self, batch: StepBatch, seen: SeenHere, depths: bytes, waits: bool = False) -> None:
        """What was accepted, for the drafter. ``waits``: as in ``Speculator.show_next``."""
        self._speculator.show_next(seen, np.frombuffer(batch.generations, dtype=np.int32), waits)
        if self._judges:
            levels = np.frombuffer(depths, dtype=np.int32).tolist()
            self._speculator.drafter.judged(seen.slots.tolist(), (seen.counts - 1).tolist(), levels)

    def _draft(self, batch: StepBatch) -> GuessesHere | None:
        """Trees of all rows, of the root alone where nothing is to be guessed."""
        state, slots = self._state, self._slots
        assert state.here is not None
        known, capacity, left = self._known, self._room, self._left - 1
        limits = np.minimum(np.frombuffer(batch.drafts, dtype=np.int32), capacity - known)
        limits = np.minimum(limits, np.minimum(left, self._most) if self._linear else np.where(left > 0, self._most, 0))
        some = np.flatnonzero(limits > 0)
        roots = known - 1
        if not len(some):
            return GuessesHere(state.here[slots, roots][:, None].astype(np.int64), np.ones(len(slots), dtype=np.int64))
        steps = min(batch.levels or self._steps, self._steps)
        if self._linear:
            steps = min(steps, int(limits.max()))
        if len(some) == len(slots):
            return self._drafts.draft(slots, roots, capacity, limits, steps, self._draws)
        draws = None if self._draws is None else self._draws[some]
        found = self._drafts.draft(slots[some], roots[some], capacity[some], limits[some], steps, draws)
        return None if found is None else _spread(found, some, state.here[slots, roots])

    def _verify_trees(self, batch: StepBatch, trees: GuessesHere) -> Chained | None:
        state, slots, counts, drafted_at = self._state, self._slots, trees.counts, time.perf_counter()
        assert state.here is not None
        if counts.max() == 1:
            return Chained(b"", b"", b"", b"", drafted_at)
        roots = self._known - 1
        offsets = np.zeros(len(slots) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        draws = None if self._draws is None else np.repeat(self._draws, counts)
        if trees.parents is None:
            accepted = self._verify(slots, roots, counts, trees.tokens, draws)
            if accepted is None:
                return None
            kept = np.arange(int(accepted[0])) if len(slots) == 1 else ragged(offsets[:-1], accepted)
            depths = counts - 1
        else:
            found = self._run_trees(trees, roots, offsets, draws)
            if found is None:
                return None
            accepted, kept, depths = found
        features = self._target.features if self._speculator.drafter.features else None
        levels = depths.astype(np.int32).tobytes()
        self._show(batch, SeenHere(slots, roots, accepted, features, kept), levels)
        if len(slots) == 1:
            first = int(roots[0]) + 1
            emitted = state.here[int(slots[0]), first : first + int(accepted[0])]
        else:
            emitted = state.here[np.repeat(slots, accepted), ragged(roots + 1, accepted)]
        told, drafted = (part.astype(np.int32).tobytes() for part in (accepted, counts - 1))
        return Chained(emitted.tobytes(), told, drafted, levels, drafted_at)

    def _run_trees(
        self, trees: GuessesHere, roots: Longs, offsets: Longs, draws: Draws | None
    ) -> tuple[Longs, Longs, Longs] | None:
        """-> tokens accepted of each row, which nodes of the step they are, and how deep each tree was."""
        state, slots, counts = self._state, self._slots, trees.counts
        assert state.here is not None
        assert trees.depths is not None
        rows, width = trees.tokens.shape
        levels = np.arange(width)
        run = levels < counts[:, None]
        ids = trees.tokens[run].astype(np.int32)
        places = (roots[:, None] + levels)[run]
        index = places_of(state.pages, np.repeat(slots, counts), places, state.page_size)
        positions = (roots[:, None] + trees.depths)[run]
        lengths = roots + counts
        pages = state.pages[slots, : int(lengths.max() - 1) // state.page_size + 1]
        tokens = DecodeTokens(ids, positions, index, pages, lengths, offsets, trees.bits)
        sampled, broken = self._target.next(tokens, draws, positions + 1)
        if broken.any():
            return None
        after = np.zeros((rows, width), dtype=np.int64)
        after[run] = sampled
        paths = _walk(trees, after, self._depth)
        accepted = np.array([len(path) for path in paths], dtype=np.int64)
        kept = np.repeat(offsets[:-1], accepted) + np.concatenate(paths)
        self._move(index, kept, ragged(offsets[:-1], accepted))
        state.here[np.repeat(slots, accepted), ragged(roots + 1, accepted)] = sampled[kept]
        state.known[slots] += accepted
        state.computed[slots] += accepted
        return accepted, kept, np.where(run, trees.depths, 0).max(1)

    def _move(self, index: Longs, kept: Longs, consecutive: Longs) -> None:
        """Bring the keys and values of accepted nodes to the positions that follow one another."""
        astray = kept != consecutive
        if astray.any():
            source, into = torch.from_numpy(index[kept[astray]]), torch.from_numpy(index[consecutive[astray]])
            self._platform.move_caches(self._caches, source, into, len(source))


def _walk(trees: GuessesHere, after: Longs, depth: int) -> list[list[int]]:
    """The nodes of each row's tree that are right, the root first; ``after`` [rows, nodes]: what follows each."""
    assert trees.parents is not None
    found = []
    for parents, tokens, count, said in zip(
        trees.parents.tolist(), trees.tokens.tolist(), trees.counts.tolist(), after.tolist(), strict=True
    ):
        at, path = 0, [0]
        for node in range(1, count):  # parents come first, and of children with the same token the first counts
            if parents[node] == at and tokens[node] == said[at] and len(path) <= depth:
                at = node
                path.append(node)
        found.append(path)
    return found


def _spread(trees: GuessesHere, rows: Longs, roots: Ints) -> GuessesHere:
    """``trees`` as those of ``rows`` among more, of which the others have their root alone: a token of ``roots``."""

    def all_rows(part: Longs | None, root: Longs | int) -> Longs | None:
        if part is None:
            return None
        whole = np.zeros((len(roots), part.shape[1]), dtype=np.int64)
        whole[:, 0] = root
        whole[rows] = part
        return whole

    tokens = all_rows(trees.tokens, roots.astype(np.int64))
    assert tokens is not None
    counts = np.ones(len(roots), dtype=np.int64)
    counts[rows] = trees.counts
    return GuessesHere(tokens, counts, all_rows(trees.parents, -1), all_rows(trees.depths, 0), all_rows(trees.bits, 1))
