"""WakeLimiter: wakes only a few tasks in each turn of the event loop when many become ready at once."""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["WakeLimiter"]


class WakeLimiter:
    """Releases ``each`` waiters in each turn of one event loop, first come first served. Timers, sockets and actors run
    in between, so thousands of waiters do not block the loop. A single waiter does not wait."""

    def __init__(self, each: int) -> None:
        if each < 1:
            raise ValueError("each is below 1, so no waiter would ever be woken: pass 1 or more")
        self._each = each
        self._passed = 0  # in this turn
        self._turning = False  # whether the end of this turn is scheduled
        self._waiting: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        """Number of waiters that are not woken yet."""
        return len(self._waiting)

    async def enter(self) -> None:
        """Wait to be released."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.release(future)
        await future

    def release(self, future: asyncio.Future[None]) -> None:
        """Set the future's result in this or a later turn of its loop. A cancelled future loses its place."""
        if not self._turning:
            self._turning = True
            future.get_loop().call_soon(self._rotate)
        if self._passed < self._each and not self._waiting:
            self._go(future)
        else:
            self._waiting.append(future)

    def _rotate(self) -> None:
        self._passed = 0
        self._turning = False
        while self._waiting and self._passed < self._each:
            future = self._waiting.popleft()
            if not self._turning:
                self._turning = True
                future.get_loop().call_soon(self._rotate)
            self._go(future)

    def _go(self, future: asyncio.Future[None]) -> None:
        if not future.done():
            self._passed += 1
            future.set_result(None)
