"""DrainRate: how fast requests end under load, and when a refused client should try again."""

from __future__ import annotations

import math

__all__ = ["MAX_WAIT_SECONDS", "DrainRate"]

MAX_WAIT_SECONDS = 120.0
"""Seconds. Common clients give up on a larger Retry-After instead of waiting."""

_MIN_WAIT_SECONDS = 1.0
_UNKNOWN_WAIT_SECONDS = 5.0  # reported while nothing is measured yet
_WINDOW_SECONDS = 10.0  # seconds of busy time over which an ending is forgotten
_MIN_SPAN_SECONDS = 0.25  # seconds of busy time below which there is no rate to speak of


class DrainRate:
    """Units (sequences, or prompt tokens) that end per second of busy time: an exponentially weighted average.

    Idle time does not count: at low load few requests end, however many could. Refused clients are counted in a
    queue that empties at the measured rate, so that many clients refused at once get different times to retry.
    """

    def __init__(self) -> None:
        self._ended = 0.0
        self._span = 0.0  # weighted seconds in which they ended
        self._at = 0.0
        self._promised = 0.0  # units of refused clients, not due yet
        self._promised_at = 0.0

    def observe(self, now: float, ended: float, *, busy: bool) -> None:
        """``ended`` units have ended at ``now``; ``busy``: whether the server was busy since the last call."""
        if busy:
            kept = math.exp(-max(now - self._at, 0.0) / _WINDOW_SECONDS)
            self._ended = self._ended * kept + ended
            self._span = self._span * kept + _WINDOW_SECONDS * (1.0 - kept)
        self._at = now

    @property
    def rate(self) -> float:
        """Units a second; 0 while it is not known."""
        return self._ended / self._span if self._span >= _MIN_SPAN_SECONDS else 0.0

    def promise(self, units: float, over: float, now: float) -> float:
        """Seconds after which ``units`` should fit, with ``over`` units too many held for them now."""
        rate = self.rate
        if rate <= 0.0:
            return _UNKNOWN_WAIT_SECONDS
        waited = max(now - self._promised_at, 0.0)
        ahead = max(self._promised - rate * waited, 0.0)
        self._promised = min(ahead + units, rate * MAX_WAIT_SECONDS)
        self._promised_at = now
        return min(max(math.ceil((over + ahead) / rate), _MIN_WAIT_SECONDS), MAX_WAIT_SECONDS)
