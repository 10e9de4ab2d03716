"""Who waits, who runs and in which slot, and what of it the cache and the worker have yet to be told."""

from __future__ import annotations

import sys
from typing import Literal

import msgspec

from actors.protocol import Commit, Emission, Ended, Lease
from actors.scheduling.config import PlannerConfig
from actors.scheduling.fairness import FairShare
from actors.scheduling.sequence import Sequence, Status
from actors.scheduling.siblings import PrefillsUnderWay
from actors.scheduling.slots import Slots
from actors.scheduling.waiting import WaitingQueue

__all__ = ["Move", "Roster"]


class Move(msgspec.Struct, frozen=True):
    """A sequence has come onto the device or left it. ``output``: its tokens so far."""

    kind: Literal["started", "preempted", "displaced", "ended"]
    sequence: int
    output: int


class Roster:
    """Moves sequences between the queue, the device and their end, and keeps the books of each move.

    Leaving the device takes effect here at once. The cache hears of it with the next :meth:`news`, the worker with the
    next batch (``slots.released``).
    """

    def __init__(self, config: PlannerConfig, shares: FairShare) -> None:
        self._use_cache = config.use_cache
        self._shares = shares
        self.sequences: dict[int, Sequence] = {}
        self.waiting = WaitingQueue()
        self.running: dict[int, Sequence] = {}  # in order of admission
        self.prefilling: dict[int, Sequence] = {}  # of them, those with more than one known token to run
        self.slots = Slots(config.max_slots)
        self.siblings = PrefillsUnderWay(1)
        self.page_size = 0
        self.preemptions = 0
        self.moves: list[Move] = []
        self.may_admit = True  # False: the head of the queue did not fit, and nothing has changed since
        self._serial = 0
        self._dirty: list[Sequence] = []  # with pages to commit
        self._final_commits: list[Commit] = []  # of sequences in ...
        self._closes: list[int] = []  # ... those to be closed

    def new_worker(self, page_size: int) -> None:
        """Slots and cache are empty: what ran waits again, and there is no news of it to tell."""
        self.page_size = page_size
        self.slots.reset()
        self.siblings = PrefillsUnderWay(page_size)
        self.prefilling.clear()
        self._dirty.clear()
        self._final_commits.clear()
        self._closes.clear()
        for sequence in self.running.values():
            self._moved("displaced", sequence)
            self._wait(sequence)
        self.running.clear()
        self.may_admit = True

    # -- moves --------------------------------------------------------------------------------------------------------

    def queue(self, sequence: Sequence) -> None:
        """A new sequence."""
        self._shares.arrive(sequence.tenant, self.running.values())
        self.sequences[sequence.id] = sequence
        self.waiting.add(sequence)
        self.may_admit = True

    def start(self, sequence: Sequence, lease: Lease) -> None:
        """From the queue to the device: a slot, and the shared pages."""
        size = self.page_size
        self.waiting.remove(sequence)
        self.running[sequence.id] = sequence
        sequence.status = Status.RUNNING
        self._serial += 1
        sequence.serial = self._serial
        sequence.slot, sequence.generation = self.slots.take()
        self._moved("started", sequence)
        self._shares.admit(sequence, lease.cached)
        sequence.computed = sequence.scheduled = sequence.capacity = lease.cached
        sequence.shared = lease.cached // size
        sequence.told = sequence.length
        sequence.commit_at = sys.maxsize
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = lease.cached
        if self._use_cache:
            sequence.commit_at = lease.cached + size
            if sequence.shared < sequence.prompt_length // size:
                self.siblings.add(sequence)

    def refuse(self, sequence: Sequence) -> None:
        """A waiting sequence got a lease but does not fit: the lease is given back."""
        sequence.rest()
        self._closes.append(sequence.id)
        self.may_admit = False

    def preempt(self, sequence: Sequence) -> None:
        """Back to its old place in the queue; what it computed stays as long as the cache can keep it."""
        self._moved("preempted", sequence)
        self._leave_device(sequence)
        self._wait(sequence)
        sequence.progressed = False
        self.preemptions += 1

    def drop(self, sequence: Sequence) -> None:
        """A sequence ends, without a word."""
        if sequence.status is Status.RUNNING:
            self._moved("ended", sequence)
            self._leave_device(sequence)
        else:
            self.waiting.remove(sequence)
            self.may_admit = True
        sequence.status = Status.FINISHED
        del self.sequences[sequence.id]
        self._shares.leave(sequence.tenant)

    def end(self, sequence: Sequence, ended: Ended) -> Emission:
        """A sequence ends without a further token; returns the word of it."""
        self.drop(sequence)
        return Emission(
            sequence=sequence.id,
            start=len(sequence.output),
            cached_tokens=max(sequence.cached_tokens, 0),
            ended=ended,
        )

    def _moved(self, kind: Literal["started", "preempted", "displaced", "ended"], sequence: Sequence) -> None:
        self.moves.append(Move(kind, sequence.id, len(sequence.output)))

    def _wait(self, sequence: Sequence) -> None:
        sequence.rest()
        sequence.status = Status.WAITING
        self.waiting.add(sequence)

    def _leave_device(self, sequence: Sequence) -> None:
        self._shares.settle((sequence,))
        del self.running[sequence.id]
        self.prefilling.pop(sequence.id, None)
        self.siblings.discard(sequence)
        self.slots.give_back(sequence.slot)
        if sequence.computed >= sequence.commit_at:
            self._final_commits.append(self._commit(sequence))
        self._closes.append(sequence.id)
        sequence.serial = 0
        self.may_admit = True

    # -- news for the cache -------------------------------------------------------------------------------------------

    def filled_page(self, sequence: Sequence) -> None:
        """A running sequence has computed ``commit_at`` tokens: another page to share."""
        self._dirty.append(sequence)
        if sequence.commit_at <= sequence.prompt_length:
            self.may_admit = True  # a page of a prompt: who shares it may fit now

    @property
    def has_closes(self) -> bool:
        return bool(self._closes)

    @property
    def has_news(self) -> bool:
        return bool(self._dirty or self._closes)

    def news(self) -> tuple[tuple[Commit, ...], tuple[int, ...]]:
        """Commits and closes since the last call, the closing commits before the closes."""
        commits = self._final_commits
        for sequence in self._dirty:
            if sequence.serial and sequence.computed >= sequence.commit_at:
                commits.append(self._commit(sequence))
        closes = tuple(self._closes)
        self._final_commits, self._dirty, self._closes = [], [], []
        return tuple(commits), closes

    def _commit(self, sequence: Sequence) -> Commit:
        """The full pages that are certainly computed, told once."""
        start, sequence.told = sequence.told, sequence.length
        sequence.shared = sequence.computed // self.page_size
        sequence.commit_at = (sequence.shared + 1) * self.page_size
        if sequence.shared >= sequence.prompt_length // self.page_size:
            self.siblings.discard(sequence)
        return Commit(sequence=sequence.id, tokens=sequence.tokens_from(start), computed=sequence.computed)
