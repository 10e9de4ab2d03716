"""AdapterPlaces: which adapters may run together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from actors.scheduling.sequence import Sequence

__all__ = ["AdapterPlaces"]


class AdapterPlaces:
    """At most ``limit`` different adapters among the running sequences; 0: any number.

    Waiting sequences are examined in the order of the queue. The first of each adapter without a place closes, for all
    after it, the adapter with the fewest running sequences, the older one of equals: no more of it are admitted until
    its running ones have ended, and their place is free. The lowest count never rises while a sequence waits, so
    that every wait is bounded, whatever arrives. Adapters that are not closed go on meanwhile.
    """

    def __init__(self, limit: int, running: Iterable[Sequence]) -> None:
        self._limit = limit
        self._running: Counter[int] = Counter()
        self._closed: set[int] = set()
        self._waiting: set[int] = set()
        if limit:
            self._running.update(sequence.spec.adapter for sequence in running if sequence.spec.adapter)

    def fits(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence may be admitted; those before it have been examined."""
        adapter = sequence.spec.adapter
        if not adapter or not self._limit:
            return True
        if adapter in self._running:
            return adapter not in self._closed
        if len(self._running) < self._limit:
            return True
        if adapter not in self._waiting:
            self._waiting.add(adapter)
            if open_ := self._running.keys() - self._closed:
                self._closed.add(min(open_, key=lambda each: (self._running[each], each)))
        return False

    def take(self, sequence: Sequence) -> None:
        """Count a sequence that was admitted."""
        if self._limit and sequence.spec.adapter:
            self._running[sequence.spec.adapter] += 1
