"""Full garbage collections at quiet moments: with two thousand connections one holds the event loop for 0.1 s."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["QUIET", "QuietCollector"]

QUIET = 64
"""Live requests up to which a full collection holds the loop for some milliseconds only."""

_YOUNG = 10_000
"""Container objects, fewer freed than made, after which the youngest are collected: about a millisecond."""

_NEVER = 2**31 - 1
_SECONDS = 1.0
_MIDDLE_COLLECTIONS = 20
"""Collections of the middle generation, each of up to ten young ones, after which a full one no longer waits."""


class QuietCollector:
    """Takes the full collections of this process over from the interpreter, for as long as :meth:`running`.

    A full one is made when something has become old since the last, and ``quiet()`` says that nobody waits; or when so
    much has become old that memory matters more. What is alive at the start is never looked at again.
    """

    def __init__(self, quiet: Callable[[], bool]) -> None:
        self._quiet = quiet
        self._since = 0  # middle collections at the last full one

    @contextmanager
    def running(self) -> Iterator[None]:
        """Needs a running event loop. Afterwards the interpreter collects as it did before."""
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

    def look(self) -> bool:
        """Collect if it is time to; whether it was."""
        aged = self._middle() - self._since
        if not aged or (aged < _MIDDLE_COLLECTIONS and not self._quiet()):
            return False
        gc.collect()
        self._since = self._middle()
        return True

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_SECONDS)
            self.look()

    @staticmethod
    def _middle() -> int:
        return int(gc.get_stats()[1]["collections"])
