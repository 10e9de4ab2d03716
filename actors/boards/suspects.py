"""Suspects: finds the sequence that kills a worker, by running halves of the suspects apart.

When a worker dies, the sequences in its steps become suspects. Suspects run again apart from all other sequences, one
half after the other. A suspect is cleared when it repeats its part of the lost step without a death. At a further death
the suspects of the lost step are halved again; a suspect that was alone in a lost step for the second time is
condemned. So one harmful sequence among n is found in at most ``log2(n) + 1`` further deaths (2 where n is 1). Deaths
that no sequence caused condemn none: by the next such death nearly all suspects have been cleared.

This is adaptive group testing by halving: R. Dorfman, "The Detection of Defective Members of Large Populations" (1943);
F. K. Hwang, "A Method for Detecting All Defective Members in a Population by Group Testing" (1972).
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import msgspec

__all__ = ["Cohort", "Rerun", "Suspects", "Verdict"]

_MAX_UNPROVED = 4
"""Consecutive condemned sequences, none cleared between them, after which deaths count again: the device may be
broken."""


class Rerun(msgspec.Struct, frozen=True):
    """The condition that clears a suspect: ``tokens`` of it computed and, with ``decode``, the result of a decode
    step."""

    tokens: int
    decode: bool


class Verdict(msgspec.Struct, frozen=True):
    """The conclusion from a death. ``quarantined``: sequences that must not run again. ``counts``: whether the death
    counts towards the restart intensity; one that narrows the suspects down does not."""

    quarantined: tuple[int, ...] = ()
    counts: bool = True


class Cohort(msgspec.Struct, frozen=True):
    """The sequences that a step may run: the ``members`` or, with ``excluded``, all others.

    ``reserved``: slots to leave free for waiting suspects.
    """

    members: frozenset[int]
    excluded: bool = False
    reserved: int = 0

    def takes(self, sequence: int) -> bool:
        return (sequence in self.members) is not self.excluded


class Suspects:
    """The suspects of one engine, in groups. The first group runs; no step mixes suspects and other sequences.

    Plain data that outlives the scheduler.
    """

    def __init__(self) -> None:
        self._groups: list[list[int]] = []
        self._reruns: dict[int, Rerun] = {}
        self._alone: set[int] = set()  # suspects that were alone in a lost step
        self._unproved = 0  # condemned sequences since the last cleared one

    def __len__(self) -> int:
        return len(self._reruns)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._reruns

    def died(self, lost: Mapping[int, Rerun]) -> Verdict:
        """Judge the death of a worker. ``lost``: the sequences in its steps without a result."""
        suspected = [sequence for sequence in lost if sequence in self._reruns]
        if not suspected:
            self._reruns.update(lost)
            self._groups += _halves(list(lost))
            return Verdict()
        for sequence in suspected:
            before, now = self._reruns[sequence], lost[sequence]
            self._reruns[sequence] = Rerun(max(before.tokens, now.tokens), before.decode or now.decode)
        self._remove(suspected)
        quarantined: tuple[int, ...] = ()
        if len(suspected) == 1 and suspected[0] in self._alone:
            quarantined = (suspected[0],)
            self._forget(suspected[0])
            self._unproved += 1
        else:
            self._groups[:0] = _halves(suspected)
            if len(suspected) == 1:
                self._alone.add(suspected[0])
        return Verdict(quarantined, counts=self._unproved > _MAX_UNPROVED)

    def were_alone(self) -> frozenset[int]:
        """The suspects that were alone in a lost step."""
        return frozenset(self._alone)

    def ran(self, sequence: int, computed: int, *, decode: bool) -> None:
        """Record the result of a step with this sequence: ``computed`` tokens are done, the last of them in a
        ``decode`` or not."""
        rerun = self._reruns.get(sequence)
        if rerun is not None and computed >= rerun.tokens and (decode or not rerun.decode):
            self._forget(sequence)
            self._remove([sequence])
            self._unproved = 0

    def retain(self, live: Container[int]) -> None:
        """Forget the sequences that have ended."""
        ended = [sequence for sequence in self._reruns if sequence not in live]
        if ended:
            for sequence in ended:
                self._forget(sequence)
            self._remove(ended)

    def release(self, sequences: Container[int]) -> Suspects:
        """Remove these sequences. The result has their groups and reruns, for :meth:`adopt`."""
        result = Suspects()
        result._reruns = {number: rerun for number, rerun in self._reruns.items() if number in sequences}
        groups = ([number for number in group if number in result._reruns] for group in self._groups)
        result._groups = [group for group in groups if group]
        result._alone = self._alone & result._reruns.keys()
        for sequence in result._reruns:
            self._forget(sequence)
        self._remove(list(result._reruns))
        return result

    def adopt(self, other: Suspects) -> None:
        """Take over the suspects of another replica, in their groups. ``other`` must not be used any more."""
        self._reruns |= other._reruns
        self._groups += other._groups
        self._alone |= other._alone

    def cohorts(self, running: Container[int]) -> tuple[Cohort, Cohort]:
        """The suspects that run next, and the sequences that are not suspected. Requires that there are suspects."""
        waiting = sum(sequence not in running for sequence in self._reruns)
        return (
            Cohort(frozenset(self._groups[0])),
            Cohort(frozenset(self._reruns), excluded=True, reserved=waiting),
        )

    def _forget(self, sequence: int) -> None:
        del self._reruns[sequence]
        self._alone.discard(sequence)

    def _remove(self, sequences: list[int]) -> None:
        gone = frozenset(sequences)
        groups = ([sequence for sequence in group if sequence not in gone] for group in self._groups)
        self._groups = [group for group in groups if group]


def _halves(sequences: list[int]) -> list[list[int]]:
    half = (len(sequences) + 1) // 2
    return [part for part in (sequences[:half], sequences[half:]) if part]
