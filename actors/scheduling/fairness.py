"""Fair shares for tenants: the tenant with the least service goes first."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator

from actors.scheduling.sequence import Sequence

__all__ = ["FairShare"]

_OUTPUT_WEIGHT = 2
"""Weight of an output token; a prompt token weighs 1. Each output token takes a row of a step."""


class FairShare:
    """Virtual token counters, after Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024).

    Every tenant has a counter of the tokens computed for it. Prompt tokens count at admission, without cached ones;
    output tokens count as they are sampled. A scored prompt token counts as an output token: both take a row of logits.
    The tenant with the lowest counter is next. The policy is work-conserving: a tenant alone gets everything. A tenant
    that comes back starts at least at the lowest counter of those present, so idle time is not saved up to starve the
    others later. A tenant with a higher counter keeps it.
    """

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._present: Counter[str] = Counter()  # sequences that wait or run

    @property
    def several(self) -> bool:
        """Whether sequences of more than one tenant wait or run."""
        return len(self._present) > 1

    def served(self, tenant: str) -> float:
        """The tenant's counter, in weighted tokens."""
        return self._counters.get(tenant, 0.0)

    def arrive(self, tenant: str, running: Iterable[Sequence]) -> None:
        """Record that a sequence of this tenant is queued. ``running``: the sequences on the device."""
        if tenant not in self._present and self._present:
            self.charge(running)
            floor = min(self._counters[name] for name in self._present)
            self._counters = {
                name: count for name, count in self._counters.items() if name in self._present or count > floor
            }
            self._counters.setdefault(tenant, floor)
        self._counters.setdefault(tenant, 0.0)
        self._present[tenant] += 1

    def leave(self, tenant: str) -> None:
        """Record that a sequence of this tenant has ended."""
        self._present[tenant] -= 1
        if not self._present[tenant]:
            del self._present[tenant]
        if not self._present:
            self._counters.clear()  # an idle engine keeps no history

    def admit(self, sequence: Sequence, cached: int) -> None:
        """Charge the prompt of a sequence at its admission. ``cached``: its tokens found in the cache."""
        sequence.charged = sequence.length
        self._counters[sequence.tenant] += _prompt_weight(sequence) * (sequence.length - cached)

    def charge(self, running: Iterable[Sequence]) -> None:
        """Charge the output tokens of running sequences since the last call."""
        for sequence in running:
            self._counters[sequence.tenant] += _OUTPUT_WEIGHT * (sequence.known - sequence.charged)
            sequence.charged = sequence.known

    def interleave(self, waiting: Iterable[Sequence], running: Iterable[Sequence]) -> Iterator[Sequence]:
        """Yield waiting sequences in the order of fair shares; the order within a tenant is kept.

        A yielded sequence counts as its whole prompt. Ties go to the tenant with fewer sequences on the device.
        """
        self.charge(running)
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
    """The weight of a computed prompt token."""
    return _OUTPUT_WEIGHT if sequence.scores_prompt else 1
