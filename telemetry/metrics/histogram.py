"""A histogram with cheap writes: a list of counts and a sum, read at the scrape."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

__all__ = ["Histogram"]


class Histogram:
    """Counts of observations by bucket, and their sum. ``bounds``: inclusive upper ends of the buckets; one more bucket
    is above the last.

    Unlike ``prometheus_client.Histogram`` it adds many equal observations at once and has no lock: one thread writes
    it, and a reader may see an observation in its count shortly before it is in the sum.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Observe ``value`` ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus' buckets: (upper end, observations up to it), the last one ``+Inf``."""
        buckets, seen = [], 0
        for bound, count in zip((*self.bounds, float("inf")), list(self.counts), strict=True):
            seen += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(seen)))
        return buckets
