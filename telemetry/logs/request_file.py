"""One JSON line for each ended request, in files (``--export-metrics-to-file``).

The event loop only queues a line; a thread writes it. A file is for one hour (UTC) and limited in size.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import deque
from datetime import UTC, datetime
from pathlib import Path

from telemetry.logs.request_times import request_times
from telemetry.timeline import Hop, Mark, RequestTimeline

__all__ = ["RequestFile"]

_log = logging.getLogger("troupe.request_file")

_MAX_WAITING = 100_000
"""Queued lines. If the disk is too slow, the oldest are dropped, and the log reports their number."""


class RequestFile:
    """Listens to timelines. Run :meth:`write` in a task; on cancellation it writes the rest."""

    def __init__(self, directory: str, *, largest: int = 64 * 2**20, interval: float = 1.0) -> None:
        self._directory = Path(directory).expanduser()
        self._largest = largest  # bytes
        self._interval = interval  # seconds between two writes
        self._lines: deque[tuple[float, bytes]] = deque()  # with their time, seconds since 1970
        self._lost = 0
        self._number = 0
        self._hour = ""
        self._failed = False
        self._closed = False

    # -- events of timelines

    def began(self, timeline: RequestTimeline) -> None:
        """Recorded at the end."""

    def hop_ended(self, timeline: RequestTimeline, hop: Hop) -> None:
        """Recorded at the end."""

    def marked(self, timeline: RequestTimeline, mark: Mark) -> None:
        """Recorded at the end."""

    def ended(self, timeline: RequestTimeline) -> None:
        if timeline.probe:
            return
        if len(self._lines) >= _MAX_WAITING:
            self._lines.popleft()
            self._lost += 1
        outcome, end = timeline.outcome, timeline.end or timeline.started
        ended = timeline.started_unix + end - timeline.started
        record = {
            "time": datetime.fromtimestamp(ended, UTC).isoformat(),
            "request_id": timeline.request_id,
            "label": timeline.label,
            "operation": timeline.operation,
            "model": timeline.model,
            "finish_reasons": outcome.finish_reasons if outcome is not None else (),
            "error_type": outcome.error_type or None if outcome is not None else None,
            **request_times(timeline),
            "parameters": {name.removeprefix("gen_ai.request."): value for name, value in timeline.request.items()},
        }
        # json of the standard library: it writes any text as ASCII, surrogate halves too
        self._lines.append((ended, json.dumps(record, default=str).encode() + b"\n"))
        if self._closed:  # a reader that receives the end after the engine's
            self.flush()

    # -- writing

    async def write(self) -> None:
        """Write queued lines periodically, until cancelled."""
        try:
            while True:
                await asyncio.sleep(self._interval)
                if self._lines:
                    await asyncio.to_thread(self.flush)
        finally:
            self._closed = True
            self.flush()

    def flush(self) -> None:
        """Write queued lines. An error of the disk is logged once, and the lines are lost."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            while self._lines:
                path = self._path(self._lines[0][0])
                with path.open("ab") as file:
                    while self._lines and file.tell() < self._largest and self._hour == _hour(self._lines[0][0]):
                        with contextlib.suppress(IndexError):
                            file.write(self._lines.popleft()[1])
            self._failed = False
        except OSError as error:
            lost = len(self._lines) + self._lost
            self._lines.clear()
            self._lost = 0
            if not self._failed:
                _log.error("Lines of %d requests are lost: %s cannot be written: %s", lost, self._directory, error)
            self._failed = True
        if self._lost:
            _log.warning("Lines of %d requests are lost: %s is slower than the server", self._lost, self._directory)
            self._lost = 0

    def _path(self, ended: float) -> Path:
        """The file for a line of this time, with room left."""
        if _hour(ended) != self._hour:
            self._hour, self._number = _hour(ended), 0
        while True:
            path = self._directory / f"troupe-requests-{self._hour}-{self._number:03d}.jsonl"
            if not path.exists() or path.stat().st_size < self._largest:
                return path
            self._number += 1


def _hour(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y%m%dT%H")
