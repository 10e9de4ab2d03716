"""Full garbage collections while the server is idle: with two thousand connections one blocks the loop for 0.1 s."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["IDLE_REQUESTS", "IdleGarbageCollector"]

IDLE_REQUESTS = 64
"""Live requests up to which the server counts as idle: a full collection then blocks the loop for milliseconds."""

_YOUNG = 10_000
"""Net new container objects after which the youngest generation is collected, in about a millisecond."""

_NEVER = 2**31 - 1
_SECONDS = 1.0
_MIDDLE_COLLECTIONS = 20
"""Collections of the middle generation after which a full one no longer waits for an idle moment."""


class IdleGarbageCollector:
    """Replaces the interpreter's full collections inside of :meth:`running`.

    A full collection runs when objects have become old since the last one and ``is_idle()`` is true, or when so many
    have become old that memory matters more. Objects alive at the start are frozen and never collected.
    """

    def __init__(self, is_idle: Callable[[], bool]) -> None:
        self._is_idle = is_idle
        self._since = 0  # middle collections at the last full one

    @contextmanager
    def running(self) -> Iterator[None]:
        """Needs a running event loop. At the end the interpreter's settings are restored."""
        before = gc.get_threshold()
        gc.collect()
        gc.freeze()
        gc.set_threshold(_YOUNG, before[1], _NEVER)
        self._since = self._middle()
        task = asyncio.create_task(self._watch(), name="troupe-collector")
        try:
            yield
        finally:
            task.cancel()
            gc.set_threshold(*before)
            gc.unfreeze()

    def collect_if_due(self) -> bool:
        """Collect if it is time; return whether it was."""
        aged = self._middle() - self._since
        if not aged or (aged < _MIDDLE_COLLECTIONS and not self._is_idle()):
            return False
        gc.collect()
        self._since = self._middle()
        return True

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_SECONDS)
            self.collect_if_due()

    @staticmethod
    def _middle() -> int:
        return int(gc.get_stats()[1]["collections"])
