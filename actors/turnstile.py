"""A turnstile: of many that want to run at once, a few go on in each turn of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["Turnstile"]


class Turnstile:
    """Lets ``each`` waiters a turn go on, first come first served, so that timers, sockets and the other actors get
    their turn in between: two thousand that arrive in one moment must not hold up the loop for as long as all of them
    take. Who comes alone does not wait. Belongs to one event loop."""

    def __init__(self, each: int) -> None:
        if each < 1:
            raise ValueError("nobody would ever pass: let at least one go on in each turn")
        self._each = each
        self._passed = 0  # in this turn
        self._turning = False  # whether the end of this turn is scheduled
        self._waiting: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        """Those who wait."""
        return len(self._waiting)

    async def enter(self) -> None:
        """Wait for one's turn."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.release(future)
        await future

    def release(self, future: asyncio.Future[None]) -> None:
        """Set the future's result in this turn of its loop or in a later one. A cancelled future loses its place."""
        if not self._turning:
            self._turning = True
            future.get_loop().call_soon(self._turn)
        if self._passed < self._each and not self._waiting:
            self._go(future)
        else:
            self._waiting.append(future)

    def _turn(self) -> None:
        self._passed = 0
        self._turning = False
        while self._waiting and self._passed < self._each:
            future = self._waiting.popleft()
            if not self._turning:
                self._turning = True
                future.get_loop().call_soon(self._turn)
            self._go(future)

    def _go(self, future: asyncio.Future[None]) -> None:
        if not future.done():
            self._passed += 1
            future.set_result(None)
