"""Equal shares for tenants: who has had less goes first."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator

from actors.scheduling.sequence import Sequence

__all__ = ["FairShare"]

_OUTPUT_WEIGHT = 2
"""An output token counts as so many prompt tokens: it takes a place in a step of its own."""


class FairShare:
    """Virtual token counters, after Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024).

    Every tenant has a counter of the tokens computed for it: those of a prompt when it is admitted, cached ones left
    out, outputs as they come. A prompt token that is scored counts as an output token: both take a row of logits. The
    tenant with the lowest counter is next. Nobody is kept idle for it: a tenant alone gets everything. Who comes back
    starts no lower than the lowest of those who are there, so that nobody saves up idle time to starve the others with
    it later; and who has had more than the others has it still when it returns.
    """

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._present: Counter[str] = Counter()  # sequences that wait or run

    @property
    def several(self) -> bool:
        """Whether sequences of more than one tenant wait or run."""
        return len(self._present) > 1

    def served(self, tenant: str) -> float:
        """The tenant's counter."""
        return self._counters.get(tenant, 0.0)

    def arrive(self, tenant: str, running: Iterable[Sequence]) -> None:
        """A sequence of this tenant is queued; ``running`` are those on the device."""
        if tenant not in self._present and self._present:
            self.settle(running)
            floor = min(self._counters[name] for name in self._present)
            self._counters = {
                name: count for name, count in self._counters.items() if name in self._present or count > floor
            }
            self._counters.setdefault(tenant, floor)
        self._counters.setdefault(tenant, 0.0)
        self._present[tenant] += 1

    def leave(self, tenant: str) -> None:
        """A sequence of this tenant has ended."""
        self._present[tenant] -= 1
        if not self._present[tenant]:
            del self._present[tenant]
        if not self._present:
            self._counters.clear()  # an idle engine owes nobody anything

    def admit(self, sequence: Sequence, cached: int) -> None:
        """The sequence comes onto the device, which finds so many of its tokens in the cache."""
        sequence.charged = sequence.length
        self._counters[sequence.tenant] += _prompt_weight(sequence) * (sequence.length - cached)

    def settle(self, running: Iterable[Sequence]) -> None:
        """Charge what running sequences have put out since the last time."""
        for sequence in running:
            self._counters[sequence.tenant] += _OUTPUT_WEIGHT * (sequence.known - sequence.charged)
            sequence.charged = sequence.known

    def interleave(self, waiting: Iterable[Sequence], running: Iterable[Sequence]) -> Iterator[Sequence]:
        """Waiting sequences in the order of fair shares, each tenant's own in the order given.

        A sequence taken counts as its whole prompt until the counters say better. Between equals goes first who has
        fewer on the device.
        """
        self.settle(running)
        queues: dict[str, list[Sequence]] = {}
        for sequence in waiting:
            queues.setdefault(sequence.tenant, []).append(sequence)
        places = Counter(sequence.tenant for sequence in running)
        heap = [(self._counters[name], places[name], at, name, 0) for at, name in enumerate(queues)]
        heapq.heapify(heap)
        while heap:
            count, held, at, name, index = heap[0]
            queue = queues[name]
            sequence = queue[index]
            if index + 1 < len(queue):
                heapq.heapreplace(
                    heap, (count + _prompt_weight(sequence) * sequence.length, held + 1, at, name, index + 1)
                )
            else:
                heapq.heappop(heap)
            yield sequence


def _prompt_weight(sequence: Sequence) -> int:
    """What a computed token counts while the sequence comes onto the device."""
    return _OUTPUT_WEIGHT if sequence.scores_prompt else 1
