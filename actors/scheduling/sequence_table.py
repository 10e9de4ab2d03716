"""SequenceTable: which sequences wait and run, in which slots, and unsent updates for cache and worker."""

from __future__ import annotations

import sys
from typing import Literal

import msgspec

from actors.protocol import CommitTokens, Ended, PrefixMatch, SequenceOutput
from actors.scheduling.bounded_reservations import BoundedReservations
from actors.scheduling.config import PlannerConfig
from actors.scheduling.fairness import FairShare
from actors.scheduling.in_flight_prefixes import InFlightPrefixes
from actors.scheduling.sequence import Sequence, Status
from actors.scheduling.slots import Slots
from actors.scheduling.waiting import WaitingQueue

__all__ = ["Move", "SequenceTable"]


class Move(msgspec.Struct, frozen=True):
    """A sequence has moved onto or off the device. ``output``: its output tokens so far."""

    kind: Literal["started", "preempted", "displaced", "ended"]
    sequence: int
    output: int


class SequenceTable:
    """Moves sequences between the queue and the device, and ends them.

    A sequence that leaves the device is gone here at once. The cache learns it with the next :meth:`take_updates`, the
    worker with the next batch (``slots.take_released``).

    A sequence with a grammar that has left the device is held: a new worker has not compiled the grammar, and one that
    has may have forgotten it. So are those that wait when a worker comes.
    """

    def __init__(self, config: PlannerConfig, shares: FairShare) -> None:
        self._use_cache = config.use_cache
        self._shares = shares
        self.sequences: dict[int, Sequence] = {}
        self.waiting = WaitingQueue()
        self.held: dict[int, Sequence] = {}  # whose grammars the worker compiles before they may wait
        self.running: dict[int, Sequence] = {}  # in order of admission
        self.prefilling: dict[int, Sequence] = {}  # running sequences with more than one known token to compute
        self.slots = Slots(config.max_slots)
        self.siblings = InFlightPrefixes(1)
        self.page_size = 0
        self.reservations: BoundedReservations | None = None  # None: no group is bounded
        self.preemptions = 0
        self.moves: list[Move] = []
        self.may_admit = True  # False: the head of the queue did not fit, and no room was freed since
        self._serial = 0
        self._dirty: list[Sequence] = []  # with pages to commit
        self._final_commits: list[CommitTokens] = []  # last commits of the sequences in ...
        self._closed: list[int] = []  # ... this list, which the cache closes

    def new_worker(
        self, page_size: int, reservations: BoundedReservations | None = None, shared_pages: int = 1
    ) -> None:
        """Start with empty slots and an empty cache: running sequences wait again, unsent updates are dropped.
        ``shared_pages``: as ``InFlightPrefixes``."""
        self.page_size = page_size
        self.reservations = reservations
        self.slots.reset()
        self.siblings = InFlightPrefixes(page_size, shared_pages)
        self.prefilling.clear()
        self._dirty.clear()
        self._final_commits.clear()
        self._closed.clear()
        for sequence in self.running.values():
            self._moved("displaced", sequence)
            self._wait(sequence)
        self.running.clear()
        for sequence in [each for each in self.waiting if each.spec.sampling.grammar is not None]:
            self.hold(sequence)
        self.may_admit = True

    # -- moves --------------------------------------------------------------------------------------------------------

    def queue(self, sequence: Sequence) -> None:
        """Add a new sequence to the queue."""
        self._shares.arrive(sequence.tenant, self.running.values())
        self.sequences[sequence.id] = sequence
        self.waiting.add(sequence)
        self.may_admit = True

    def hold(self, sequence: Sequence) -> None:
        """Take a sequence out of the queue until the worker has compiled its grammar."""
        self.waiting.remove(sequence)
        self.held[sequence.id] = sequence

    def release(self, sequence: Sequence) -> None:
        """Return a held sequence to its place in the queue."""
        del self.held[sequence.id]
        self.waiting.add(sequence)
        self.may_admit = True

    def start(self, sequence: Sequence, prefix: PrefixMatch) -> None:
        """Move a sequence from the queue to the device, with a slot and the shared pages of the cached prefix."""
        size = self.page_size
        self.waiting.remove(sequence)
        self.running[sequence.id] = sequence
        sequence.status = Status.RUNNING
        self._serial += 1
        sequence.serial = self._serial
        sequence.slot, sequence.generation = self.slots.take()
        self._moved("started", sequence)
        self._shares.admit(sequence, prefix.cached)
        sequence.computed = sequence.scheduled = sequence.capacity = prefix.cached
        sequence.shared = prefix.cached // size
        sequence.committed = sequence.length
        sequence.commit_at = sys.maxsize
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = prefix.cached
        if self.reservations is not None:
            self.reservations.take(sequence)
        if self._use_cache or self.reservations is not None:  # commits also release pages of bounded groups
            sequence.commit_at = prefix.cached + size
        if self._use_cache and sequence.shared < sequence.prompt_length // size:
            self.siblings.add(sequence)

    def refuse(self, sequence: Sequence) -> None:
        """Return the cached prefix of a waiting sequence that does not fit."""
        sequence.leave_device()
        self._closed.append(sequence.id)
        self.may_admit = False

    def preempt(self, sequence: Sequence) -> None:
        """Move a sequence back to its old place in the queue. Its computed pages stay cached as long as there is
        room."""
        self._moved("preempted", sequence)
        self._leave_device(sequence)
        self._wait(sequence)
        sequence.progressed = False
        self.preemptions += 1

    def drop(self, sequence: Sequence) -> None:
        """End a sequence without an output."""
        if sequence.status is Status.RUNNING:
            self._moved("ended", sequence)
            self._leave_device(sequence)
        elif self.held.pop(sequence.id, None) is None:
            self.waiting.remove(sequence)
            self.may_admit = True
        sequence.status = Status.FINISHED
        del self.sequences[sequence.id]
        self._shares.leave(sequence.tenant)

    def end(self, sequence: Sequence, ended: Ended) -> SequenceOutput:
        """End a sequence without a further token; returns its last output."""
        self.drop(sequence)
        return SequenceOutput(
            sequence=sequence.id,
            start=len(sequence.output),
            cached_tokens=max(sequence.cached_tokens, 0),
            ended=ended,
        )

    def _moved(self, kind: Literal["started", "preempted", "displaced", "ended"], sequence: Sequence) -> None:
        self.moves.append(Move(kind, sequence.id, len(sequence.output)))

    def _wait(self, sequence: Sequence) -> None:
        sequence.leave_device()
        sequence.status = Status.WAITING
        if sequence.spec.sampling.grammar is None:
            self.waiting.add(sequence)
        else:
            self.held[sequence.id] = sequence

    def _leave_device(self, sequence: Sequence) -> None:
        self._shares.charge((sequence,))
        del self.running[sequence.id]
        self.prefilling.pop(sequence.id, None)
        self.siblings.discard(sequence)
        self.slots.give_back(sequence.slot)
        if self.reservations is not None:
            self.reservations.give_back(sequence)
        if sequence.computed >= sequence.commit_at:
            self._final_commits.append(self._commit(sequence))
        self._closed.append(sequence.id)
        sequence.serial = 0
        self.may_admit = True

    # -- updates for the cache ----------------------------------------------------------------------------------------

    def filled_page(self, sequence: Sequence) -> None:
        """Record that a running sequence has computed ``commit_at`` tokens: another page can be shared."""
        self._dirty.append(sequence)
        if sequence.commit_at <= sequence.prompt_length:
            self.may_admit = True  # a sequence that shares this prompt page may fit now

    @property
    def has_closes(self) -> bool:
        return bool(self._closed)

    @property
    def has_updates(self) -> bool:
        return bool(self._dirty or self._closed)

    def take_updates(self) -> tuple[tuple[CommitTokens, ...], tuple[int, ...]]:
        """Commits and closes since the last call; a sequence is committed before it is closed."""
        commits = self._final_commits
        for sequence in self._dirty:
            if sequence.serial and sequence.computed >= sequence.commit_at:
                commits.append(self._commit(sequence))
        closed = tuple(self._closed)
        self._final_commits, self._dirty, self._closed = [], [], []
        return tuple(commits), closed

    def _commit(self, sequence: Sequence) -> CommitTokens:
        """A commit of the full pages that the worker has confirmed, each page once."""
        start, sequence.committed = sequence.committed, sequence.length
        sequence.shared = sequence.computed // self.page_size
        sequence.commit_at = (sequence.shared + 1) * self.page_size
        if sequence.shared >= sequence.prompt_length // self.page_size:
            self.siblings.discard(sequence)
        return CommitTokens(sequence=sequence.id, tokens=sequence.tokens_from(start), computed=sequence.computed)
