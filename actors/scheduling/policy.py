"""The order of the queue and the choice of the running sequence to preempt."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Many
from operator import attrgetter

from actors.scheduling.config import PlannerConfig
from actors.scheduling.fairness import FairShare
from actors.scheduling.sequence import Sequence
from actors.scheduling.waiting import WaitingQueue

__all__ = ["LPM_LIMIT", "Policy"]

_priority = attrgetter("priority")

LPM_LIMIT = 128  # with more waiting sequences, cached prefixes are not compared; as in SGLang


class Policy:
    """Orders the queue and picks victims.

    Priorities age: each ``ageing_seconds`` of waiting count as one level, which bounds the wait of the lowest. Ageing
    affects the order of the queue only; preemption compares the original priorities. Under lpm, sequences that have
    waited ``ageing_seconds`` come first, in the order of arrival. With several tenants, these rules order the sequences
    of each tenant. Between tenants only their shares count, so no tenant's priorities delay another.
    """

    def __init__(self, config: PlannerConfig, shares: FairShare) -> None:
        self._shares = shares
        self._priorities = config.priority_scheduling
        self._sign = -1 if config.low_priority_values_first else 1
        self._threshold = config.preemption_threshold
        self._ageing = config.ageing_seconds
        self._lpm = config.policy == "lpm" and config.use_cache

    @property
    def has_tenants(self) -> bool:
        """Whether sequences of more than one tenant wait or run."""
        return self._shares.several

    def are_owed(self, waiting: WaitingQueue, prefilling: Collection[Sequence]) -> bool:
        """Whether a waiting tenant without a running prompt has had no more service than one with a prompt."""
        if not self._shares.several:
            return False
        busy = {sequence.tenant for sequence in prefilling}
        others = waiting.tenants.keys() - busy
        served = self._shares.served
        return bool(others) and min(map(served, others)) <= max(map(served, busy))

    def effective_priority(self, priority: int) -> int:
        """The priority of a request with larger values first; 0 when priorities are off."""
        return self._sign * priority if self._priorities else 0

    def wants_prefixes(self, waiting: WaitingQueue) -> bool:
        """Whether ``order`` needs the cached tokens of the waiting sequences."""
        return self._lpm and 1 < len(waiting) <= LPM_LIMIT

    def order(
        self,
        waiting: WaitingQueue,
        running: Collection[Sequence],
        now: float,
        cached: Many[int] | None = None,
    ) -> Iterable[Sequence]:
        """The queue in the order of admission. ``cached``: cached tokens of each sequence, in the order of arrival."""
        ordered = self._own_order(waiting, now, cached)
        return self._shares.interleave(ordered, running) if self._shares.several else ordered

    def _own_order(self, waiting: WaitingQueue, now: float, cached: Many[int] | None) -> list[Sequence]:
        sequences = list(waiting)
        if cached is None and not self._priorities:
            return sequences
        prefix = {s.id: c for s, c in zip(sequences, cached, strict=True)} if cached is not None else {}

        def key(sequence: Sequence) -> tuple[int, int, int]:
            waited = max(now - sequence.spec.arrival, 0.0)
            level = sequence.priority + math.floor(waited / self._ageing) if self._priorities else 0
            if waited >= self._ageing:
                return -level, 0, 0
            return -level, 1, -prefix.get(sequence.id, 0)

        return sorted(sequences, key=key)  # stable: ties stay in the order of arrival

    def weakest(self, running: Iterable[Sequence]) -> Sequence:
        """The first to be preempted: of the tenant with most service, the lowest priority, the latest arrival."""
        served = self._shares.served
        return min(running, key=lambda s: (-served(s.tenant), s.priority, -s.arrival_order[0], -s.arrival_order[1]))

    def strongest(self, running: Iterable[Sequence]) -> Sequence:
        """The last to be preempted."""
        served = self._shares.served
        return max(running, key=lambda s: (-served(s.tenant), s.priority, -s.arrival_order[0], -s.arrival_order[1]))

    def may_preempt(self, candidate: Sequence, victim: Sequence) -> bool:
        """Whether a waiting sequence may preempt a running one: same tenant, priority higher by more than the
        threshold."""
        return (
            self._priorities
            and candidate.tenant == victim.tenant
            and candidate.priority - victim.priority > self._threshold
        )

    def pressing(self, waiting: WaitingQueue, running: Collection[Sequence]) -> Sequence | None:
        """The waiting sequence that may preempt a running one, or None."""
        if not self._priorities or not waiting or not running:
            return None
        if max(map(_priority, waiting)) - min(map(_priority, running)) <= self._threshold:
            return None
        if not self._shares.several:
            return self.strongest(waiting)
        weakest: dict[str, int] = {}
        for sequence in running:
            weakest[sequence.tenant] = min(weakest.get(sequence.tenant, sequence.priority), sequence.priority)
        candidates = [s for s in waiting if s.priority - weakest.get(s.tenant, s.priority) > self._threshold]
        return self.strongest(candidates) if candidates else None
