"""Observation: keeps the results of steps until the drafter observes them.

Decodes of several steps are observed together while no draft token is needed, at the cost of one observation. On the
CPU they wait in a ``Backlog`` without further work, so that a step that drafts nothing costs the same as in an engine
that never drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.core.arrays import Bools, Ints, Longs, ragged
from kernels.core.batch import BoundedRows
from kernels.devices.base import Device
from kernels.devices.memory import PendingCopies
from kernels.speculation.drafter import Drafter, Observation
from kernels.speculation.native_drafts import NativeDrafts, NativeObservation, Raw, raw
from kernels.state.slots import SlotTable
from kernels.state.step_rows import StepRows

__all__ = ["Backlog", "Observer", "Run", "max_backlog"]

MAX_SLOT_BYTES = 1 << 20
"""The most bytes of features that are kept for one slot."""
MIN_TOKENS, MAX_TOKENS = 64, 256
"""The most tokens that are kept for one slot: with large features, and with none."""


def max_backlog(width: int) -> int:
    """The most tokens that are kept for one slot, with features of this width."""
    return min(max(MAX_SLOT_BYTES // (2 * max(width, 1)), MIN_TOKENS), MAX_TOKENS)


@dataclass
class _Span:
    """Consecutive ``steps`` of the same requests. ``positions``: those of the first step. Features lie from ``begin``
    on, step after step."""

    slots: Longs
    generations: Ints
    positions: Longs
    begin: int
    steps: int = 0


class Backlog:
    """Decodes that wait on the host until the drafter observes those of a slot together.

    ``width``: numbers of a token's features; 0 if the drafter does not use them.
    """

    def __init__(self, state: SlotTable, width: int) -> None:
        self._state, self._width = state, width
        self._max_steps = max_backlog(width)
        room = len(state.known) * self._max_steps
        self._features: Raw = np.zeros((room, width), dtype=np.int16)  # the system allocates it as it is written
        self._full = room - 2 * len(state.known)  # beyond it two more steps may not fit
        self._kept = self._steps = 0
        self._spans: list[_Span] = []

    def drop(self) -> None:
        """Forget all tokens."""
        self._spans = []
        self._kept = self._steps = 0

    def add(self, slots: Longs, generations: Ints, positions: Longs, features: Raw | None) -> bool:
        """Add the next token of each slot. ``features`` [rows, width]. Returns whether two more steps have room."""
        span = _Span(slots, generations, positions, self._kept)
        self._spans.append(span)
        return self._keep(span, features)

    def is_last(self, slots: Longs) -> bool:
        """Whether exactly these ``slots`` were added last."""
        last = self._spans[-1] if self._spans else None
        return last is not None and last.slots is slots and last.begin + last.steps * len(slots) == self._kept

    def add_again(self, features: Raw | None) -> bool:
        """Add the next token of the slots that were added last. Returns as ``add``."""
        return self._keep(self._spans[-1], features)

    def _keep(self, span: _Span, features: Raw | None) -> bool:
        begin = self._kept
        self._kept = end = begin + len(span.slots)
        if features is not None:
            self._features[begin:end] = features
        span.steps += 1
        self._steps += 1
        return self._steps + 1 < self._max_steps and end < self._full

    def add_accepted(self, observation: NativeObservation, generations: Ints) -> bool:
        """Add the accepted tokens of a drafting step. Returns whether they fit, with room for two more steps; otherwise
        adds nothing."""
        max_count, count = int(observation.counts.max()), len(observation.places)
        if self._steps + max_count + 1 >= self._max_steps or self._kept + count >= self._full:
            return False
        slots, positions = (
            np.repeat(observation.slots, observation.counts),
            ragged(observation.starts, observation.counts),
        )
        begin, self._kept = self._kept, self._kept + count
        self._spans.append(_Span(slots, np.repeat(generations, observation.counts), positions, begin, 1))
        if observation.features is not None:
            self._features[begin : self._kept] = observation.features[observation.places]
        self._steps += max_count
        return True

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept."""
        return not self._spans

    def take(self) -> NativeObservation | None:
        """Take all tokens of requests that still run, the shortest rows first, and empty the backlog."""
        spans = self._spans
        self.drop()
        if not spans:
            return None
        state = self._state
        slots, positions, places = [], [], []
        for each in spans:
            alive = np.flatnonzero(state.active[each.slots] & (state.generation[each.slots] == each.generations))
            steps = np.arange(each.steps)[:, None]
            slots.append(np.tile(each.slots[alive], len(steps)))
            positions.append((each.positions[alive] + steps).reshape(-1))
            places.append((each.begin + steps * len(each.slots) + alive).reshape(-1))
        if not any(map(len, slots)):
            return None
        owners, at, result = (np.concatenate(parts) for parts in (slots, positions, places))
        order = np.lexsort((at, owners))
        named, first, counts = np.unique(owners[order], return_index=True, return_counts=True)
        by_count = np.argsort(counts, kind="stable")
        rows = ragged(first[by_count], counts[by_count])
        features = self._features if self._width else None
        return NativeObservation(
            named[by_count], at[order][first[by_count]], counts[by_count], features, result[order][rows]
        )


SHORT = 16
"""The most tokens of an observed row that does not count as a prompt."""
MAX_PENDING = 16
"""The most decodes of a slot that wait to be observed together, on accelerators."""


@dataclass(frozen=True, eq=False)
class Run:
    """A step that was launched.

    ``reached`` bool [rows]: rows that sampled. ``outcome``: ``VerifyResult.outcome`` of the rows with draft tokens.
    ``tokens`` [entries]: sampled tokens, for a drafter that needs them on the host, with their rows in the step
    (``token_rows``) and levels (``token_places``). ``states``: the rows of states with draft tokens.
    """

    step: StepRows
    generations: Ints
    reached: Bools
    features: Tensor | None
    outcome: PendingCopies | None
    tokens: PendingCopies | None
    token_rows: Longs
    token_places: Longs
    states: tuple[BoundedRows, ...] = ()


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows of a run. ``places``: the index of each of their tokens in the features, row after row."""

    slots: Longs
    generations: Ints
    starts: Longs
    counts: Longs
    reached: Bools
    features: Tensor | None
    places: Longs
    sampled: tuple[Ints, ...]


class Observer:
    """Lets the drafter observe the results of steps, at once or several decodes together (see
    ``kernels.speculation``)."""

    def __init__(self, drafter: Drafter, device: Device, slots: SlotTable) -> None:
        self._drafter, self._device, self._slots = drafter, device, slots
        self._wide = drafter.features
        self._pending: list[_Rows] = []
        self._native_drafts: NativeDrafts | None = None
        self._deferred: Backlog | None = None

    def use_host(self, drafts: NativeDrafts | None, width: int) -> None:
        """Keep decodes in one ``Backlog``, if the device is the host and features are bf16, ``width`` wide. ``drafts``
        observe if they can. Requires an empty observer."""
        self._native_drafts = drafts
        self._deferred = Backlog(self._slots, width if self._drafter.features else 0)

    @property
    def can_defer(self) -> bool:
        """Whether decodes may be deferred: ``use_host`` was called."""
        return self._deferred is not None

    @property
    def is_empty(self) -> bool:
        """Whether no tokens are kept for later."""
        return not self._pending and (self._deferred is None or self._deferred.is_empty)

    def defer(self, slots: Longs, generations: Ints, positions: Longs, features: Raw | None) -> bool:
        """Defer one decode of each slot. Returns as ``defer_again``."""
        assert self._deferred is not None
        return self.flush_if_full(self._deferred.add(slots, generations, positions, features if self._wide else None))

    def flush_if_full(self, room: bool) -> bool:
        """Observe all kept tokens if there is no ``room`` for more. Returns ``room``."""
        if not room:
            self.flush()
        return room

    def drop(self) -> None:
        """Forget all unobserved tokens."""
        self._pending = []
        if self._deferred is not None:
            self._deferred.drop()

    def is_last_deferred(self, slots: Longs) -> bool:
        """Whether exactly these ``slots`` were deferred last."""
        return self._deferred is not None and self._deferred.is_last(slots)

    def defer_again(self, features: Raw | None) -> bool:
        """Defer one more decode of the same slots. Returns whether another one has room."""
        assert self._deferred is not None
        return self._deferred.add_again(features if self._wide else None)

    def add(self, run: Run, rows: Longs, counts: Longs, paths: Longs | None) -> None:
        """Add ``rows`` of a run. ``counts`` [all rows]: computed tokens of each. ``paths`` [rows verified, levels]: the
        accepted nodes of rows that verified draft tokens.
        """
        step, some = run.step, counts[rows]
        places = ragged(step.offsets[rows], some)
        if paths is not None:
            ends, first = np.cumsum(some), step.decodes
            for place in np.flatnonzero((rows >= first) & (rows < first + step.verifies)).tolist():
                count, end, row = int(some[place]), int(ends[place]), int(rows[place])
                places[end - count : end] = step.offsets[row] + paths[row - first, :count]
        self._pending.append(
            _Rows(
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

    def show(self, observation: NativeObservation, generations: Ints) -> None:
        """Observe decodes that reached their last known token, together with kept tokens. Requires ``use_host``."""
        self.flush()
        self._see(observation, generations, np.ones(len(observation.slots), dtype=bool))

    def defer_accepted(self, observation: NativeObservation, generations: Ints) -> None:
        """Defer a drafting step's accepted tokens if the next step does not draft; observe them now without room."""
        assert self._deferred is not None
        if not self._deferred.add_accepted(observation, generations):
            self.show(observation, generations)

    def defer_pending(self) -> None:
        """Defer the rows that were added last, unless they are long or much is already deferred."""
        last = self._pending[-1] if self._pending else None
        if last is None:
            return
        if len(self._pending) >= MAX_PENDING or (last.counts > 1).any():
            self.flush()
        elif self._deferred is not None:
            self._pending.pop()
            features = None if last.features is None else raw(last.features)[last.places]
            self.defer(last.slots, last.generations, last.starts, features)
        elif last.features is not None:  # the next step may overwrite them
            mine = last.features.index_select(0, self._device.memory.put(last.places))
            places = np.arange(len(last.places))
            self._pending[-1] = _Rows(
                last.slots, last.generations, last.starts, last.counts, last.reached, mine, places, last.sampled
            )

    def flush(self) -> None:
        """Let the drafter observe all kept tokens of requests that still run."""
        backlog, self._pending = self._pending, []
        if self._deferred is not None:
            kept = self._deferred.take()
            if kept is not None:
                self._see(kept, self._slots.generation[kept.slots], np.ones(len(kept.slots), dtype=bool))
            for seen in backlog:
                bits = None if seen.features is None else raw(seen.features)
                here = NativeObservation(seen.slots, seen.starts, seen.counts, bits, seen.places)
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
        # Consecutive parts of a slot become one row; decodes come first, then short rows, then prompts.
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
        self._show(
            slots[parts[heads]], starts[parts[heads]], totals[order], reached[parts[tails]],
            self._features(backlog, places[ragged(begins[parts], counts[parts])]),
            self._tokens(backlog, parts, owner),
        )  # fmt: skip

    def _show_alone(self, rows: _Rows) -> bool:
        """The usual case: one step whose requests all still run, with decodes only or rows already in order."""
        state, counts = self._slots, rows.counts
        if not (state.active[rows.slots] & (state.generation[rows.slots] == rows.generations)).all():
            return False
        kinds = (counts > 1).astype(np.int8) + (counts > SHORT)
        if len(counts) > 1 and (kinds[1:] < kinds[:-1]).any():
            return False
        sampled = rows.sampled if self._drafter.needs_host_tokens else None
        self._show(rows.slots, rows.starts, counts, rows.reached, self._features([rows], rows.places), sampled)
        return True

    def _see(self, observation: NativeObservation, generations: Ints, reached: Bools) -> None:
        """Observe on the host the rows of requests that still run."""
        state = self._slots
        alive = state.active[observation.slots] & (state.generation[observation.slots] == generations)
        if not alive.all():
            places = observation.places[np.repeat(alive, observation.counts)]
            observation = NativeObservation(
                observation.slots[alive],
                observation.starts[alive],
                observation.counts[alive],
                observation.features,
                places,
            )
            reached = reached[alive]
        if not len(observation.slots) or (self._native_drafts is not None and self._native_drafts.observe(observation)):
            return
        order = np.argsort((observation.counts > 1).astype(np.int8) + (observation.counts > SHORT), kind="stable")
        first, counts = np.cumsum(observation.counts) - observation.counts, observation.counts[order]
        features: Tensor | None = None
        if observation.features is not None:
            chosen = observation.features[observation.places[ragged(first[order], counts)]]
            features = torch.from_numpy(chosen).view(torch.bfloat16)
        self._show(observation.slots[order], observation.starts[order], counts, reached[order], features, None)

    def _features(self, backlog: list[_Rows], places: Longs) -> Tensor | None:
        held = [seen.features for seen in backlog if seen.features is not None]
        if not held:
            return None
        features = held[0] if len(held) == 1 else torch.cat(held)
        if len(places) == len(features) and np.array_equal(places, np.arange(len(places))):
            return features
        return features.index_select(0, self._device.memory.put(places))

    def _tokens(self, backlog: list[_Rows], parts: Longs, owner: Longs) -> tuple[Ints, ...] | None:
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
        state, put, size = self._slots, self._device.memory.put, self._slots.page_size
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
    """The accepted sampled tokens of each row; none in a chunk that is not the last of its prompt."""
    if run.tokens is None:
        return (np.empty(0, dtype=np.int32),) * len(rows)
    tokens = run.tokens()[0].numpy().astype(np.int32)
    limits = np.ones(len(counts), dtype=np.int64)
    limits[run.step.verifying] = counts[run.step.verifying]
    kept = run.token_places < limits[run.token_rows]
    tokens, owners = tokens[kept], run.token_rows[kept]
    return tuple([tokens[owners == row] for row in rows.tolist()])
