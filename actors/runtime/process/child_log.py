"""The log of a child process: rate-limited records that go to the parent as frames.

A burst must stall neither side: the child does not block, and the parent's loop, which reads replies from the same
link, is not flooded. Records over the limit are dropped and counted; errors have an extra allowance.
"""

import logging
import time
from collections.abc import Callable

from actors.runtime.core.message import current_traceparent
from actors.runtime.process.wire import LogLine, log_line

__all__ = ["ChildLog"]

_BURST, _RATE = 200, 50.0
"""Records in a burst, and by second."""

_URGENT_BURST, _URGENT_RATE = 50, 10.0
"""The same, in addition, for errors."""


class _Allowance:
    """A token bucket."""

    def __init__(self, burst: int, rate: float, now: float) -> None:
        self._burst = burst
        self._rate = rate
        self._left = float(burst)
        self._since = now

    def take(self, now: float) -> bool:
        self._left = min(self._burst, self._left + (now - self._since) * self._rate)
        self._since = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class ChildLog(logging.Handler):
    """Passes each record to ``send``, from any thread. ``has_room``: whether the parent keeps up.

    Records of other libraries are named below ``troupe.libraries``, so that the parent's configuration of ``troupe``
    applies to them.
    """

    def __init__(
        self,
        send: Callable[[LogLine], None],
        has_room: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.dropped = 0  # since the last report
        self._send = send
        self._has_room = has_room
        self._clock = clock
        self._usual = _Allowance(_BURST, _RATE, clock())
        self._urgent = _Allowance(_URGENT_BURST, _URGENT_RATE, clock())

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if not self._may_send(record.levelno):
                self.dropped += 1
                return
            if not record.name.startswith("troupe"):
                record.name = f"troupe.libraries.{record.name}"
            self._send(log_line(record, current_traceparent.get()))
        except Exception:
            self.handleError(record)

    def _may_send(self, level: int) -> bool:
        if not self._has_room():
            return False
        now = self._clock()
        return self._usual.take(now) or (level >= logging.ERROR and self._urgent.take(now))

    def tell_dropped(self) -> None:
        """Report how many records were dropped since the last report; call it regularly."""
        self.acquire()
        try:
            if self.dropped and self._may_send(logging.ERROR):
                text = f"{self.dropped} log records of this process were dropped: they came too fast"
                record = logging.LogRecord("troupe.logs", logging.WARNING, __file__, 0, text, None, None)
                self.dropped = 0
                self._send(log_line(record, None))
        finally:
            self.release()
