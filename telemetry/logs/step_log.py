"""A log line of the load every so many decoding steps (``--decode-log-interval``)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from telemetry.metrics.exposition import Samples
from telemetry.metrics.steps import StepShape

__all__ = ["StepLog"]

_log = logging.getLogger("troupe.steps")


class StepLog:
    """Observes each step's result. ``read`` returns metrics by name, as in a scrape."""

    def __init__(self, interval: int, read: Callable[[], Mapping[str, Samples]]) -> None:
        self._interval = interval
        self._read = read
        self._decodes = 0
        self._tokens = 0
        self._since: float | None = None

    def answered(self, shape: StepShape, now: float, *, generated: int, graph_rows: int) -> None:
        if self._since is None:
            self._since = shape.sent
        self._tokens += generated
        if not shape.decodes:
            return
        self._decodes += 1
        if self._decodes % self._interval:
            return
        own = self._read()
        used, total = _number(own, "troupe_cache_pages_used"), _number(own, "troupe_cache_pages")
        page = _number(own, "troupe_cache_page_tokens")
        _log.info(
            "Decode: %d rows in the step, %d running, %d waiting; cache %d of %d tokens (%.0f %%); %s; %.1f tokens/s",
            shape.decodes,
            _number(own, "troupe_requests_running"),
            _number(own, "troupe_requests_waiting"),
            used * page,
            total * page,
            100 * used / max(total, 1),
            "graph" if graph_rows else "eager",
            self._tokens / max(now - self._since, 1e-9),
        )
        self._tokens, self._since = 0, now


def _number(own: Mapping[str, Samples], name: str) -> float:
    value = own.get(name, 0.0)
    return value if isinstance(value, int | float) else 0.0
