"""The queue of waiting sequences."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator

from actors.scheduling.sequence import Sequence

__all__ = ["WaitingQueue"]


def _arrival_order(sequence: Sequence) -> tuple[float, int]:
    return sequence.arrival_order


class WaitingQueue:
    """Waiting sequences in the order of arrival; a preempted one returns to its old place."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self.tenants: Counter[str] = Counter()
        """How many sequences of each tenant wait; only tenants with one are in it."""
        self.tokens = 0
        """Tokens of all waiting sequences, including those whose prefix may be cached."""

    def add(self, sequence: Sequence) -> None:
        self.tokens += sequence.length
        self.tenants[sequence.tenant] += 1
        insort(self._sequences, sequence, key=_arrival_order)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence. Raises ValueError if it does not wait."""
        index = bisect_left(self._sequences, sequence.arrival_order, key=_arrival_order)
        if index == len(self._sequences) or self._sequences[index] is not sequence:
            raise ValueError(f"sequence {sequence.id} is not waiting")
        del self._sequences[index]
        self.tokens -= sequence.length
        self.tenants[sequence.tenant] -= 1
        if not self.tenants[sequence.tenant]:
            del self.tenants[sequence.tenant]

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)
