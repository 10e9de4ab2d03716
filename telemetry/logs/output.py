"""The log handler for the program around the engine. The library itself only creates records.

Troupe's loggers are ``troupe`` and those below it. An embedding program configures them as any other; the command line
uses :func:`install`.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import TextIO

from telemetry.logs.lines import Event, LogContext, text_of
from telemetry.logs.repeats import Repeats

__all__ = ["OTHER_LOGGERS", "LogOutput", "install"]

OTHER_LOGGERS = ("hypercorn.error", "opentelemetry", "asyncio", "py.warnings", "app")
"""Other loggers of the same server; the last one is Quart's."""

_MAX_WAITING = 4 * 1024 * 1024
"""Characters that may wait for a slow reader of the log."""

_PLAIN = logging.Formatter()
_SHORTEST_SECRET = 6
_FLUSH_SECONDS = 2.0


class LogOutput(logging.Handler):
    """Writes records to a stream from a separate thread, so that logging never waits for the stream.

    When the reader of the stream is too slow, records are dropped, and their number is logged later. Repeated warnings
    are counted (:class:`Repeats`). ``context`` returns the current work for records without their own. ``formatters``
    replace ``lines`` for some loggers. ``secrets`` become ``***`` everywhere: no record should contain one, and this is
    the last protection.
    """

    def __init__(
        self,
        stream: TextIO,
        lines: logging.Formatter,
        *,
        formatters: Mapping[str, logging.Formatter] | None = None,
        context: Callable[[], LogContext] | None = None,
        secrets: Sequence[str] = (),
        repeats: Repeats | None = None,
        max_waiting: int = _MAX_WAITING,
    ) -> None:
        super().__init__()
        self.setFormatter(lines)
        self.dropped = 0
        self._stream = stream
        self._formatters = dict(formatters or {})
        self._context = context
        forms = [
            form for secret in secrets if len(secret) >= _SHORTEST_SECRET for form in (secret, json.dumps(secret)[1:-1])
        ]
        self._secrets = sorted(forms, key=len, reverse=True)  # a secret may be a prefix of another
        self._repeats = repeats or Repeats()
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting: list[str] = []
        self._size = 0
        self._dropped = 0
        self._busy = False
        self._closed = False
        self._writer: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._take(record)
        except Exception:
            self.handleError(record)

    def _take(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            # events with different fields are different: each death of a worker has its own requests
            text = str(record.msg) if isinstance(record.msg, Event) else text_of(record)
            text = self._hide(text)  # before it is cut: half a secret would not be recognized
            with self._changed:
                if not self._repeats.admit(record, text, time.monotonic()):
                    return
        if self._context is not None:
            context = self._context()
            for name in ("traceparent", "request_id", "actor"):
                if getattr(record, name, None) is None:
                    setattr(record, name, getattr(context, name))
        self._put(self._line(record), always=record.levelno >= logging.CRITICAL)

    def _line(self, record: logging.LogRecord) -> str:
        formatter = self._formatters.get(record.name) or self.formatter or _PLAIN
        if self._secrets:
            record = self._clean(record, formatter)
        return self._hide(formatter.format(record)) + "\n"

    def _clean(self, record: logging.LogRecord, formatter: logging.Formatter) -> logging.LogRecord:
        """A copy without secrets in the texts that formatters cut: half a secret would not be recognized later."""
        record = copy(record)
        if isinstance(record.msg, Event):
            record.msg = copy(record.msg)
            record.msg.text = self._hide(record.msg.text)
        else:
            record.msg, record.args = self._hide(text_of(record)), None
        if record.exc_info and record.exc_info[0] is not None:
            record.exc_text = record.exc_text or formatter.formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = self._hide(record.exc_text)
        return record

    def _hide(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def _put(self, line: str, *, always: bool) -> None:
        with self._changed:
            if self._closed or (self._size > self._max_waiting and not always):
                self.dropped += 1
                self._dropped += 1
                return
            self._waiting.append(line)
            self._size += len(line)
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, name="troupe-log", daemon=True)
                self._writer.start()
            self._changed.notify_all()

    def _write(self) -> None:
        changed = self._changed
        while True:
            with changed:
                self._busy = False
                changed.notify_all()
                while not self._waiting and not self._closed:
                    if not changed.wait(1.0 if self._repeats.counting else None):
                        break
                now = math.inf if self._closed else time.monotonic()
                lines = self._waiting + self._counted(now)
                if not lines and self._closed:
                    return
                self._waiting = []
                self._busy = bool(lines)
            if lines:
                self._send("".join(lines))
            with changed:
                self._size = sum(map(len, self._waiting))

    def _counted(self, now: float) -> list[str]:
        """Lines about records that were not logged."""
        repeated = [(repeat.name, repeat.level, repeat.text) for repeat in self._repeats.due(now)]
        if self._dropped:
            text = f"{self._dropped} log records were dropped: the log's reader is slower than the log"
            repeated.append(("troupe.logs", logging.WARNING, text))
            self._dropped = 0
        return [self._line(logging.LogRecord(name, level, "", 0, text, None, None)) for name, level, text in repeated]

    def _send(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except UnicodeError:
            self._send_ascii(text)
        except (OSError, ValueError):  # the reader has gone, or the stream is closed
            self.dropped += text.count("\n")

    def _send_ascii(self, text: str) -> None:
        """For a stream whose encoding lacks a character."""
        try:
            self._stream.write(text.encode("ascii", "backslashreplace").decode())
            self._stream.flush()
        except (OSError, ValueError):
            self.dropped += text.count("\n")

    def flush(self) -> None:
        """Wait until everything is written, at most two seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._busy, _FLUSH_SECONDS)

    def close(self) -> None:
        """Write the waiting lines and counts, for at most two seconds; later records are dropped."""
        with self._changed:
            self._closed = True
            writer = self._writer
            self._changed.notify_all()
        if writer is not None:
            writer.join(_FLUSH_SECONDS)
        super().close()


def install(
    output: logging.Handler, *, level: str, http_level: str | None = None, others: Sequence[str] = OTHER_LOGGERS
) -> None:
    """Send Troupe's records of ``level`` and above, and those of ``others``, to ``output``. The root logger stays
    unchanged. ``http_level``: for the loggers of the HTTP server; None: the same."""
    for name in ("troupe", *others):
        logger = logging.getLogger(name)
        logger.addHandler(output)
        logger.propagate = False
    logging.getLogger("troupe").setLevel(level.upper())
    # Exporters of spans warn of every retry, each with another delay, before they report an error.
    logging.getLogger("opentelemetry.exporter").setLevel("DEBUG" if level == "debug" else "ERROR")
    http = (http_level or level).upper()
    for name in ("troupe.http", "troupe.server", "hypercorn.error"):
        logging.getLogger(name).setLevel(http)
