"""The lag of the event loop: the first sign of anything that blocks it."""

from __future__ import annotations

import asyncio

from telemetry.metrics.histogram import Histogram

__all__ = ["LoopLag"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class LoopLag:
    """Samples of the loop's lag, in seconds."""

    def __init__(self, interval: float = 0.05) -> None:
        self.last = 0.0
        self.histogram = Histogram(_SECONDS)
        self._interval = interval
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def tasks(self) -> int:
        """Tasks of the loop now; 0 before the first sample."""
        return len(asyncio.all_tasks(self._loop)) if self._loop is not None and self._loop.is_running() else 0

    async def sample(self) -> None:
        """Sleep and measure the delay, until cancelled."""
        loop = self._loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._interval
            await asyncio.sleep(self._interval)
            self.last = max(0.0, loop.time() - due)
            self.histogram.add(self.last)
