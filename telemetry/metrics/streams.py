"""Counters of streams on their way to clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from telemetry.metrics.histogram import Histogram

if TYPE_CHECKING:
    from telemetry.metrics.exposition import Samples

__all__ = ["StreamMetrics"]

_SLOW = 0.1  # seconds after which a client counts as slow
_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class StreamMetrics:
    """Keep-alive comments, and waits for slow clients."""

    def __init__(self) -> None:
        self.keep_alives = 0
        self._slow = Histogram(_SECONDS)

    def sent(self, seconds: float) -> None:
        """Record the wait of a write for its client, in seconds."""
        if seconds >= _SLOW:
            self._slow.add(seconds)

    def readings(self) -> Mapping[str, Samples]:
        """Samples by metric name."""
        return {"troupe_sse_keepalives_total": self.keep_alives, "troupe_slow_reader_seconds": self._slow}
