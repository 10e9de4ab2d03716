"""Warns of garbage collections that stop the whole process (``--gc-warning-threshold-secs``)."""

from __future__ import annotations

import gc
import logging
import time

__all__ = ["GcWatch"]

_log = logging.getLogger("troupe.gc")


class GcWatch:
    """Watches between :meth:`start` and :meth:`stop`, without any change to the collector.

    ``threshold``: seconds. A collection runs in the thread that allocates, and all others wait.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._began = 0.0

    def start(self) -> None:
        gc.callbacks.append(self._on_gc)

    def stop(self) -> None:
        if self._on_gc in gc.callbacks:
            gc.callbacks.remove(self._on_gc)

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
            return
        seconds = time.perf_counter() - self._began
        if self._began and seconds > self._threshold:
            _log.warning(
                "A garbage collection of generation %d held the process for %.3f s (%d objects freed)",
                info.get("generation", -1),
                seconds,
                info.get("collected", 0),
            )
        self._began = 0.0
