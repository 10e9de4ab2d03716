"""What steps computed, until the drafter sees it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.platforms.base import Fetched, Platform
from kernels.rows import StepRows, ragged
from kernels.slots import SlotTable
from kernels.speculative.drafter import Drafter, Observation
from kernels.speculative.host_drafts import HostDrafts, Raw, SeenHere, raw
from kernels.speculative.unseen import Unseen

__all__ = ["Observer", "Run"]

SHORT = 16
"""Tokens up to which a row that is observed is no prompt."""
BACKLOG = 16
"""Decodes of a slot that wait to be seen together, at most."""

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Run:
    """A step that was given to the device.

    ``reached`` bool [rows]: which sampled. ``outcome``: ``Verified.outcome`` of the rows with guesses. ``tokens``:
    what was sampled, [entries], wanted by the drafter on the host; in which rows of the step (``token_rows``), at which
    level (``token_places``).
    """

    step: StepRows
    generations: Ints
    reached: Bools
    features: Tensor | None
    outcome: Fetched | None
    tokens: Fetched | None
    token_rows: Longs
    token_places: Longs


@dataclass(frozen=True, eq=False)
class _Seen:
    """Rows of a run. ``places``: of each of their tokens among the features, one row after the other."""

    slots: Longs
    generations: Ints
    starts: Longs
    counts: Longs
    reached: Bools
    features: Tensor | None
    places: Longs
    sampled: tuple[Ints, ...]


class Observer:
    """Keeps decodes of a few steps for later where nobody drafts: seen together they cost as much as one."""

    def __init__(self, drafter: Drafter, platform: Platform, slots: SlotTable) -> None:
        self._drafter, self._platform, self._slots = drafter, platform, slots
        self._wide = drafter.features
        self._backlog: list[_Seen] = []
        self._here: HostDrafts | None = None
        self._unseen: Unseen | None = None

    def settle_here(self, drafts: HostDrafts | None, width: int) -> None:
        """Nothing is waiting. The device is the host, features are bf16 and ``width`` wide: decodes wait in one place,
        and ``drafts`` see what they can."""
        self._here = drafts
        self._unseen = Unseen(self._slots, width if self._drafter.features else 0)

    @property
    def keeps(self) -> bool:
        """Whether decodes may be shown ``later``: ``settle_here`` was called."""
        return self._unseen is not None

    @property
    def empty(self) -> bool:
        """Whether nothing was kept for later."""
        return not self._backlog and (self._unseen is None or self._unseen.empty)

    def later(self, slots: Longs, generations: Ints, positions: Longs, features: Raw | None) -> bool:
        """Decodes that are not to be seen yet. -> as ``more``."""
        assert self._unseen is not None
        return self.bound(self._unseen.add(slots, generations, positions, features if self._wide else None))

    def bound(self, room: bool) -> bool:
        """See what is kept where there is no ``room`` for more. -> whether there was."""
        if not room:
            self.flush()
        return room

    def drop(self) -> None:
        """Forget what is kept."""
        self._backlog = []
        if self._unseen is not None:
            self._unseen.drop()

    def follows(self, slots: Longs) -> bool:
        """Whether the very ``slots`` are those of which decodes were to be seen ``later`` last."""
        return self._unseen is not None and self._unseen.follows(slots)

    def more(self, features: Raw | None) -> bool:
        """One more decode of each of these. -> whether there can be another without ``bound``."""
        assert self._unseen is not None
        return self._unseen.more(features if self._wide else None)

    def add(self, run: Run, rows: Longs, counts: Longs, paths: Longs | None) -> None:
        """``rows`` of the run computed ``counts`` [all rows] tokens each, and in those that verified guesses they are
        the nodes ``paths`` [rows verified, levels].
        """
        step, some = run.step, counts[rows]
        places = ragged(step.offsets[rows], some)
        if paths is not None:
            ends, first = np.cumsum(some), step.decodes
            for place in np.flatnonzero((rows >= first) & (rows < first + step.verifies)).tolist():
                count, end, row = int(some[place]), int(ends[place]), int(rows[place])
                places[end - count : end] = step.offsets[row] + paths[row - first, :count]
        self._backlog.append(
            _Seen(
                step.slots[rows],
                run.generations[rows],
                step.starts[rows],
                some,
                run.reached[rows],
                run.features,
                places,
                _sampled(run, rows, counts),
            )
        )

    def show(self, seen: SeenHere, generations: Ints) -> None:
        """See at once decodes that each reached what was the last token, and what was kept; after ``settle_here``."""
        self.flush()
        self._see(seen, generations, np.ones(len(seen.slots), dtype=bool))

    def show_later(self, seen: SeenHere, generations: Ints) -> None:
        """The same where nothing is drafted next: it is seen with the decodes that follow, if there is room."""
        assert self._unseen is not None
        if not self._unseen.accepted(seen, generations):
            self.show(seen, generations)

    def keep(self) -> None:
        """What was added last is seen later, unless it is a lot, or there is much of it."""
        last = self._backlog[-1] if self._backlog else None
        if last is None:
            return
        if len(self._backlog) >= BACKLOG or (last.counts > 1).any():
            self.flush()
        elif self._unseen is not None:
            self._backlog.pop()
            features = None if last.features is None else raw(last.features)[last.places]
            self.later(last.slots, last.generations, last.starts, features)
        elif last.features is not None:  # the next step may overwrite them
            mine = last.features.index_select(0, self._platform.put(last.places))
            places = np.arange(len(last.places))
            self._backlog[-1] = _Seen(
                last.slots, last.generations, last.starts, last.counts, last.reached, mine, places, last.sampled
            )

    def flush(self) -> None:
        """Let the drafter see everything of requests that are there still."""
        backlog, self._backlog = self._backlog, []
        if self._unseen is not None:
            kept = self._unseen.take()
            if kept is not None:
                self._see(kept, self._slots.generation[kept.slots], np.ones(len(kept.slots), dtype=bool))
            for seen in backlog:
                features = None if seen.features is None else raw(seen.features)
                here = SeenHere(seen.slots, seen.starts, seen.counts, features, seen.places)
                self._see(here, seen.generations, seen.reached)
            return
        if not backlog:
            return
        if len(backlog) == 1 and self._show_alone(backlog[0]):
            return
        state = self._slots
        slots, starts, counts, reached = (
            np.concatenate([getattr(seen, name) for seen in backlog])
            for name in ("slots", "starts", "counts", "reached")
        )
        generations = np.concatenate([seen.generations for seen in backlog])
        lengths = np.array([0 if seen.features is None else len(seen.features) for seen in backlog])
        base = np.cumsum(lengths) - lengths
        places = np.concatenate([seen.places + begin for seen, begin in zip(backlog, base.tolist(), strict=True)])
        begins = np.cumsum(counts) - counts
        alive = np.flatnonzero(state.active[slots] & (state.generation[slots] == generations))
        if not len(alive):
            return
        # Parts of a slot, which follow one another, become one row; decodes come first, then short rows, then prompts.
        alive = alive[np.lexsort((starts[alive], slots[alive]))]
        first = np.concatenate(([True], slots[alive][1:] != slots[alive][:-1]))
        owner = np.cumsum(first) - 1
        totals = np.bincount(owner, weights=counts[alive]).astype(np.int64)
        kind = (totals > 1).astype(np.int64) + (totals > SHORT)
        order = np.argsort(kind, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        parts = alive[np.argsort(rank[owner], kind="stable")]
        owner = np.sort(rank[owner])
        heads = np.flatnonzero(np.concatenate(([True], owner[1:] != owner[:-1])))
        tails = np.append(heads[1:], len(parts)) - 1
        features = self._features(backlog, places[ragged(begins[parts], counts[parts])])
        self._show(
            slots[parts[heads]], starts[parts[heads]], totals[order], reached[parts[tails]], features,
            self._tokens(backlog, parts, owner),
        )  # fmt: skip

    def _show_alone(self, seen: _Seen) -> bool:
        """The usual case: one step, whose requests are all there still, of decodes alone or in order as they are."""
        state, counts = self._slots, seen.counts
        if not (state.active[seen.slots] & (state.generation[seen.slots] == seen.generations)).all():
            return False
        kinds = (counts > 1).astype(np.int8) + (counts > SHORT)
        if len(counts) > 1 and (kinds[1:] < kinds[:-1]).any():
            return False
        sampled = seen.sampled if self._drafter.needs_host_tokens else None
        self._show(seen.slots, seen.starts, counts, seen.reached, self._features([seen], seen.places), sampled)
        return True

    def _see(self, seen: SeenHere, generations: Ints, reached: Bools) -> None:
        """On the host: the rows of requests that are there still."""
        state = self._slots
        alive = state.active[seen.slots] & (state.generation[seen.slots] == generations)
        if not alive.all():
            places = seen.places[np.repeat(alive, seen.counts)]
            seen = SeenHere(seen.slots[alive], seen.starts[alive], seen.counts[alive], seen.features, places)
            reached = reached[alive]
        if not len(seen.slots) or (self._here is not None and self._here.observe(seen)):
            return
        order = np.argsort((seen.counts > 1).astype(np.int8) + (seen.counts > SHORT), kind="stable")
        first, counts = np.cumsum(seen.counts) - seen.counts, seen.counts[order]
        features: Tensor | None = None
        if seen.features is not None:
            chosen = seen.features[seen.places[ragged(first[order], counts)]]
            features = torch.from_numpy(chosen).view(torch.bfloat16)
        self._show(seen.slots[order], seen.starts[order], counts, reached[order], features, None)

    def _features(self, backlog: list[_Seen], places: Longs) -> Tensor | None:
        held = [seen.features for seen in backlog if seen.features is not None]
        if not held:
            return None
        features = held[0] if len(held) == 1 else torch.cat(held)
        if len(places) == len(features) and np.array_equal(places, np.arange(len(places))):
            return features
        return features.index_select(0, self._platform.put(places))

    def _tokens(self, backlog: list[_Seen], parts: Longs, owner: Longs) -> tuple[Ints, ...] | None:
        if not self._drafter.needs_host_tokens:
            return None
        tokens = [part for seen in backlog for part in seen.sampled]
        return tuple(
            [np.concatenate([tokens[part] for part in parts[owner == row]]) for row in range(int(owner[-1]) + 1)]
        )

    def _show(
        self,
        slots: Longs,
        starts: Longs,
        counts: Longs,
        reached: Bools,
        features: Tensor | None,
        sampled: tuple[Ints, ...] | None,
    ) -> None:
        state, put, size = self._slots, self._platform.put, self._slots.page_size
        positions = ragged(starts, counts)
        owners = np.repeat(slots, counts)
        columns = int(positions.max()) // size + 2
        index = state.pages[owners, positions // size] * np.int64(size) + positions % size
        at, after = put(positions), positions + 1
        self._drafter.observe(
            Observation(
                slots=slots,
                starts=starts,
                counts=counts,
                pages=state.pages[slots, :columns],
                capacity=state.page_count[slots] * size,
                reached=reached,
                token_ids=state.read(owners, positions, at).to(torch.int64),
                next_tokens=state.read(owners, after, put(after)).to(torch.int64),
                positions=at,
                cache_index=put(index),
                features=features,
                last=put(np.cumsum(counts) - 1),
                device_slots=put(slots),
                table=state.tokens,
                sampled=sampled,
            )
        )


def _sampled(run: Run, rows: Longs, counts: Longs) -> tuple[Ints, ...]:
    """What each row sampled and counts; nothing in a chunk that is not the last of its prompt."""
    if run.tokens is None:
        return (np.empty(0, dtype=np.int32),) * len(rows)
    tokens = run.tokens()[0].numpy().astype(np.int32)
    limits = np.ones(len(counts), dtype=np.int64)
    limits[run.step.verifying] = counts[run.step.verifying]
    kept = run.token_places < limits[run.token_rows]
    tokens, owners = tokens[kept], run.token_rows[kept]
    return tuple([tokens[owners == row] for row in rows.tolist()])
