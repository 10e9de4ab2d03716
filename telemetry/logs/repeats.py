"""Repeated warnings: the first is logged, the others are counted, and the count is logged after a window."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque

import msgspec

from telemetry.logs.lines import clip

__all__ = ["RepeatedRecords", "Repeats"]

_KEPT = 512
"""Characters that identify a text: its beginning, and its end, where the fields of an event are."""


class RepeatedRecords(msgspec.Struct, frozen=True):
    """A count of records that were not logged."""

    name: str
    level: int
    text: str


class _Seen(msgspec.Struct, eq=False):
    since: float
    text: str
    shown: int = 0
    held: int = 0


class Repeats:
    """Decides which records are logged. Times are seconds of a monotonic clock.

    In ``window`` seconds, one of the warnings and errors with the same text is logged, and ``burst`` of those from one
    line of code with different texts (such as aborts with their ids). All others are logged: records below WARNING are
    separate events, and CRITICAL must never be hidden.

    At most ``max_records`` texts and as many lines of code are remembered.
    """

    def __init__(self, *, window: float = 30.0, burst: int = 10, max_records: int = 256) -> None:
        self._window = window
        self._burst = burst
        self._max_records = max_records
        self._texts: OrderedDict[tuple[object, ...], _Seen] = OrderedDict()
        self._places: OrderedDict[tuple[object, ...], _Seen] = OrderedDict()
        self._forgotten: deque[RepeatedRecords] = deque(maxlen=max_records)

    def admit(self, record: logging.LogRecord, text: str, now: float) -> bool:
        """Whether to log ``record`` with the message ``text``; otherwise it is counted."""
        if not logging.WARNING <= record.levelno < logging.CRITICAL:
            return True
        text = clip(text, _KEPT)
        kind = (record.name, record.levelno)
        same = self._seen(self._texts, (*kind, text), text, now)
        if same.shown:
            same.held += 1
            return False
        alike = self._seen(self._places, (*kind, record.pathname, record.lineno), text, now)
        if alike.shown >= self._burst:
            alike.held += 1
            alike.text = text
            del self._texts[(*kind, text)]
            return False
        same.shown = 1
        alike.shown += 1
        return True

    def _seen(
        self, kept: OrderedDict[tuple[object, ...], _Seen], key: tuple[object, ...], text: str, now: float
    ) -> _Seen:
        seen = kept.get(key)
        if seen is not None and now - seen.since >= self._window:
            self._forget(kept, key)
            seen = None
        if seen is None:
            if len(kept) >= self._max_records:
                self._forget(kept, next(iter(kept)))
            seen = kept[key] = _Seen(since=now, text=text)
        return seen

    def _forget(self, kept: OrderedDict[tuple[object, ...], _Seen], key: tuple[object, ...]) -> None:
        seen = kept.pop(key)
        if not seen.held:
            return
        name, level = key[:2]
        assert isinstance(name, str)
        assert isinstance(level, int)
        if kept is self._texts:
            text = f"{seen.text} (seen {seen.held + 1} times within {self._window:g} s)"
        else:
            text = f"{seen.text} (the last of {seen.held} more like it within {self._window:g} s)"
        self._forgotten.append(RepeatedRecords(name=name, level=level, text=text))

    @property
    def counting(self) -> bool:
        """Whether :meth:`due` would return anything."""
        return bool(self._texts or self._places or self._forgotten)

    def due(self, now: float) -> list[RepeatedRecords]:
        """Counts of finished windows, each once; ``math.inf`` returns all."""
        for kept in (self._texts, self._places):
            while kept:
                key, seen = next(iter(kept.items()))
                if now - seen.since < self._window:
                    break
                self._forget(kept, key)
        counts = list(self._forgotten)
        self._forgotten.clear()
        return counts
