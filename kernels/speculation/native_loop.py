"""Steps that draft and verify on the CPU, for decodes without logit edits.

One native call drafts or verifies, and the rest is numpy. The accepted tokens are known at once, and the drafter
observes them before the next step.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch

from kernels.contract.step import RowError, StepBatch
from kernels.core.arrays import Ints, Longs, ragged
from kernels.core.attention_rows import DecodeTokens
from kernels.core.operators import Draws
from kernels.devices.prepared import DraftCycle
from kernels.models.native_model import NativeModel
from kernels.speculation.drafter import Drafter
from kernels.speculation.native_drafts import NativeDrafts, NativeObservation, NativeTrees, places_of
from kernels.speculation.speculator import Speculator
from kernels.state.native_grammars import MaskedRows, NativeChainsResult, NativeGrammars

__all__ = ["NativeDraftLoop", "NativeDraftResult"]

_ONE = np.ones(1, dtype=np.int32).tobytes()


class NativeDraftResult(NamedTuple):
    """``tokens`` int32 [accepted]: all rows', one after the other. ``accepted``, ``drafted`` (draft tokens verified)
    and ``depths`` (as in ``StepResult``) int32 [rows]. ``drafted_at``: ``time.perf_counter`` when they were drafted.
    ``failed``: rows whose grammar cannot go on."""

    tokens: bytes
    accepted: bytes
    drafted: bytes
    depths: bytes
    drafted_at: float
    failed: tuple[RowError, ...] = ()

    @property
    def idle(self) -> bool:
        """Whether the step found no draft tokens and did nothing."""
        return not self.accepted


class NativeDraftLoop:
    """Drafts with ``drafts`` and verifies by ``target``, over its ``caches``, for up to ``max_rows`` rows."""

    def __init__(
        self,
        speculator: Speculator,
        drafts: NativeDrafts,
        target: NativeModel,
        caches: list[object],
        max_rows: int,
        grammars: NativeGrammars | None = None,
    ) -> None:
        self._grammars = grammars
        self._masked: MaskedRows | None = None  # of the bound rows
        self._speculator, self._drafts, self._target, self._caches = speculator, drafts, target, caches
        self._device, self._state, self._sampler = speculator.device, speculator.slots, speculator.sampler
        self._max_rows, self._steps = max_rows, speculator.settings.num_steps
        drafter = speculator.drafter
        self._depth, self._max_drafts, self._linear = drafter.depth, drafter.max_nodes - 1, not drafter.branches
        self._verify = target.run.verify(self._state.table, target.output)
        self._cycle = drafts.cycle(target)
        self._rows: tuple[bytes, bytes] | None = None  # slots and generations of the bound rows
        self._slots: Longs = np.zeros(0, dtype=np.int64)
        self._draws: Draws | None = None
        # For each bound row: known tokens, tokens that its pages hold, and tokens until its end.
        self._known = self._room = self._left = self._slots
        self._records_acceptance = type(drafter).record_acceptance is not Drafter.record_acceptance

    def is_repeat(self, batch: StepBatch) -> bool:
        """Whether the batch has the rows that were bound last, and otherwise only grants."""
        return (
            self._rows == (batch.slots, batch.generations)
            and batch.counts == _ONE * len(self._slots)
            and len(batch.draft_limits) == len(batch.slots)
            and not (batch.admitted or batch.released)
        )

    @property
    def can_continue(self) -> bool:
        """Whether another step of the bound rows observes every token that the drafter needs.

        Then no sequence has ended either.
        """
        return self._cycle is not None and self._speculator.can_continue(self._slots)

    def bind(self, batch: StepBatch) -> bool:
        """Bind the rows of a batch whose releases, admissions and grants are done. Returns whether they can run
        here."""
        rows = len(batch.slots) // 4
        if batch.counts != _ONE * rows or len(batch.draft_limits) != len(batch.slots) or not 0 < rows <= self._max_rows:
            return False
        state = self._state
        if self._rows != (batch.slots, batch.generations):
            slots = np.frombuffer(batch.slots, dtype=np.int32)
            generations, counts = (np.frombuffer(part, dtype=np.int32) for part in (batch.generations, batch.counts))
            named = tuple(slots.tolist())
            if state.errors(slots, generations, counts) or not self._sampler.unedited(named):
                return False
            draws, at = self._sampler.draws(named), slots.astype(np.int64)
            if (draws is not None and self._target.draw is None) or not self._speculator.is_wanted(at):
                return False
            some = self._sampler.masked(named)
            masked = self._grammars.rows(named, some) if self._grammars is not None and some else None
            if some and masked is None:
                return False
            self._draws, self._slots, self._rows = draws, at, (batch.slots, batch.generations)
            self._masked = masked
        return self.refresh()

    def refresh(self) -> bool:
        """Read the lengths of the bound rows. Returns whether another such step is possible."""
        if self._cycle is not None:  # the cycle checks this itself
            return True
        state, slots = self._state, self._slots
        self._known = known = state.known[slots]
        self._room = room = state.page_count[slots] * state.page_size
        fits = (state.computed[slots] + 1 == known) & (known <= room) & (known < state.max_length)
        return bool(fits.all())

    def check_over(self) -> bool:
        """Count the tokens left for the bound sequences. Returns whether all have ended.

        Call it before ``run``, unless the loop ``can_continue``.
        """
        self._left = self._state.left(self._slots)
        return not self._left.any()

    def run(self, batch: StepBatch) -> NativeDraftResult | None:
        """Draft and verify for the bound rows.

        Returns None where the rows do not fit or logits are not finite. State is unchanged then; the caller may try the
        next executor.
        """
        if self._cycle is not None:
            return self._run_cycle(self._cycle, batch)
        trees = self._draft(batch)
        return None if trees is None else self._verify_trees(batch, trees)

    def _run_cycle(self, cycle: DraftCycle, batch: StepBatch) -> NativeDraftResult | None:
        steps, speculator = min(batch.draft_levels or self._steps, self._steps), self._speculator
        continues = speculator.can_continue(self._slots)
        left = None if continues else self._left
        result, seen = cycle(self._slots, batch.draft_limits, left, steps, self._draws, continues)
        if seen:
            speculator.mark_seen()
        if result is None:
            return None
        if not result.emitted:
            return NativeDraftResult(result.tokens, result.emitted, result.drafted, result.depths, result.drafted_at)
        features = self._target.features if speculator.drafter.features else None
        tokens = np.frombuffer(result.tokens, dtype=np.int32)
        checked = self._check_grammars(NativeChainsResult(result.roots, result.accepted, tokens, result.places))
        whole = checked.accepted is result.accepted  # else the cycle does not know what is left to observe
        shown = NativeObservation(self._slots, checked.roots, checked.accepted, features, checked.places)
        self._show(batch, shown, result.depths, whole and not result.over)
        emitted = result.emitted if whole else checked.accepted.astype(np.int32).tobytes()
        return NativeDraftResult(
            *(checked.tokens.tobytes(), emitted, result.drafted, result.depths, result.drafted_at, checked.failed)
        )

    def _check_grammars(self, chains: NativeChainsResult, trees: NativeTrees | None = None) -> NativeChainsResult:
        """Let grammars check the accepted tokens. ``trees``: those that the pass ran, where the host knows them."""
        if self._masked is None or self._grammars is None:
            return chains
        drafts = () if trees is None else trees.linear()
        return self._grammars.check_chains(self._masked, chains, self._target.logits, drafts)

    def _show(self, batch: StepBatch, observation: NativeObservation, depths: bytes, continues: bool = False) -> None:
        """Record accepted tokens for the drafter. ``continues``: as in ``Speculator.record_accepted``."""
        self._speculator.record_accepted(observation, np.frombuffer(batch.generations, dtype=np.int32), continues)
        if self._records_acceptance:
            levels = np.frombuffer(depths, dtype=np.int32).tolist()
            self._speculator.drafter.record_acceptance(
                observation.slots.tolist(), (observation.counts - 1).tolist(), levels
            )

    def _draft(self, batch: StepBatch) -> NativeTrees | None:
        """The trees of all rows; only the root in rows that do not draft."""
        state, slots = self._state, self._slots
        assert state.here is not None
        known, capacity, left = self._known, self._room, self._left - 1
        limits = np.minimum(np.frombuffer(batch.draft_limits, dtype=np.int32), capacity - known)
        limits = np.minimum(
            limits, np.minimum(left, self._max_drafts) if self._linear else np.where(left > 0, self._max_drafts, 0)
        )
        some = np.flatnonzero(limits > 0)
        roots = known - 1
        if not len(some):
            return NativeTrees(state.here[slots, roots][:, None].astype(np.int64), np.ones(len(slots), dtype=np.int64))
        steps = min(batch.draft_levels or self._steps, self._steps)
        if self._linear:
            steps = min(steps, int(limits.max()))
        if len(some) == len(slots):
            return self._drafts.draft(slots, roots, capacity, limits, steps, self._draws)
        draws = None if self._draws is None else self._draws[some]
        result = self._drafts.draft(slots[some], roots[some], capacity[some], limits[some], steps, draws)
        return None if result is None else _spread(result, some, state.here[slots, roots])

    def _verify_trees(self, batch: StepBatch, trees: NativeTrees) -> NativeDraftResult | None:
        state, slots, counts, drafted_at = self._state, self._slots, trees.counts, time.perf_counter()
        assert state.here is not None
        if counts.max() == 1:
            return NativeDraftResult(b"", b"", b"", b"", drafted_at)
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
            result = self._run_trees(trees, roots, offsets, draws)
            if result is None:
                return None
            accepted, kept, depths = result
        if len(slots) == 1:
            first = int(roots[0]) + 1
            emitted = state.here[int(slots[0]), first : first + int(accepted[0])]
        else:
            emitted = state.here[np.repeat(slots, accepted), ragged(roots + 1, accepted)]
        checked = self._check_grammars(NativeChainsResult(roots, accepted, emitted, kept), trees)
        features = self._target.features if self._speculator.drafter.features else None
        levels = depths.astype(np.int32).tobytes()
        self._show(batch, NativeObservation(slots, roots, checked.accepted, features, checked.places), levels)
        emitted_counts, drafted = (part.astype(np.int32).tobytes() for part in (checked.accepted, counts - 1))
        return NativeDraftResult(checked.tokens.tobytes(), emitted_counts, drafted, levels, drafted_at, checked.failed)

    def _run_trees(
        self, trees: NativeTrees, roots: Longs, offsets: Longs, draws: Draws | None
    ) -> tuple[Longs, Longs, Longs] | None:
        """Verify trees -> accepted tokens of each row, their nodes in the step, and the depth of each tree."""
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
        sampled, nonfinite = self._target.next(tokens, draws, positions + 1)
        if nonfinite.any():
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
        """Move the keys and values of accepted nodes to consecutive positions."""
        astray = kept != consecutive
        if astray.any():
            source, into = torch.from_numpy(index[kept[astray]]), torch.from_numpy(index[consecutive[astray]])
            self._device.cache.move_all(self._caches, source, into, len(source))


def _walk(trees: NativeTrees, after: Longs, depth: int) -> list[list[int]]:
    """The accepted nodes of each row's tree, the root first. ``after`` [rows, nodes]: the token sampled after each."""
    assert trees.parents is not None
    result = []
    for parents, tokens, count, next_tokens in zip(
        trees.parents.tolist(), trees.tokens.tolist(), trees.counts.tolist(), after.tolist(), strict=True
    ):
        at, path = 0, [0]
        for node in range(1, count):  # parents come first; among children with the same token the first counts
            if parents[node] == at and tokens[node] == next_tokens[at] and len(path) <= depth:
                at = node
                path.append(node)
        result.append(path)
    return result


def _spread(trees: NativeTrees, rows: Longs, roots: Ints) -> NativeTrees:
    """Trees of all rows: ``trees`` for ``rows``, and only the root, a token of ``roots``, for all others."""

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
    return NativeTrees(tokens, counts, all_rows(trees.parents, -1), all_rows(trees.depths, 0), all_rows(trees.bits, 1))
