"""The log of a child process: its records go to the parent as frames, in no greater number than the parent can bear.

A burst must stall nobody: the child does not wait, and the parent's loop, which reads answers from the same link, does
not drown. What is over the limit is dropped and counted, errors later than the rest.
"""

import logging
import time
from collections.abc import Callable

from actors.runtime.message import current_traceparent
from actors.runtime.wire import LogLine, log_line

__all__ = ["ChildLog"]

_BURST, _RATE = 200, 50.0
"""Records at once, and a second afterwards."""

_URGENT_BURST, _URGENT_RATE = 50, 10.0
"""The same, in addition, for errors."""


class _Allowance:
    """A bucket of tokens: full at first, refilled with time."""

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
    """Gives each record to ``send``, from whichever thread logs; ``has_room`` says whether the parent keeps up.

    Records of other libraries get names below ``troupe.libraries``, so that whoever configures ``troupe`` in the parent
    has all of them.
    """

    def __init__(
        self,
        send: Callable[[LogLine], None],
        has_room: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.dropped = 0  # not told of yet
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
        """Say how many were dropped since this was last said; call it now and then."""
        self.acquire()
        try:
            if self.dropped and self._may_send(logging.ERROR):
                text = f"{self.dropped} log records of this process were dropped: they came too fast"
                record = logging.LogRecord("troupe.logs", logging.WARNING, __file__, 0, text, None, None)
                self.dropped = 0
                self._send(log_line(record, None))
        finally:
            self.release()
