"""The progress of loading in the terminal: a bar on a tty, otherwise one log line a stage."""

from __future__ import annotations

import logging
import shutil
import sys
from types import TracebackType
from typing import Self, TextIO

__all__ = ["ProgressReport"]

log = logging.getLogger("troupe")


class ProgressReport:
    """Draws only changes, and removes the bar at the end."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._bar = self._stream.isatty()
        self._shown = ""
        self._stage = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def show(self, progress: float, stage: str) -> None:
        """``progress``: 0 .. 1."""
        if self._bar:
            self._draw(min(1.0, max(0.0, progress)), stage)
        elif stage and stage != self._stage:
            log.info("loading: %s (%.0f%%)", stage, progress * 100)
        self._stage = stage

    def _draw(self, progress: float, stage: str) -> None:
        columns = shutil.get_terminal_size().columns
        width = max(10, min(40, columns - 30))
        full = round(progress * width)
        line = f"loading [{'#' * full}{'.' * (width - full)}] {progress:4.0%} {stage}"[: columns - 1]
        if line != self._shown:
            self._stream.write(f"\r\x1b[K{line}")
            self._stream.flush()
            self._shown = line
