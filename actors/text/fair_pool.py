"""Turns: a pool that tenants use in turn, so that none waits for all requests of another."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

__all__ = ["FairPool"]

T = TypeVar("T")


class FairPool(Generic[T]):
    """A pool whose members are lent to one user at a time. The waiting tenant that was served longest ago is next.

    Requests of one tenant are served in order. No member is idle while a request waits.
    """

    def __init__(self, members: Iterable[T]) -> None:
        self._free = list(members)
        self._waiting: dict[str, deque[asyncio.Future[T]]] = {}
        self._served: dict[str, int] = {}  # number of each tenant's last turn
        self._turn = 0

    @asynccontextmanager
    async def lend(self, tenant: str) -> AsyncIterator[T]:
        """Wait for the tenant's turn and lend a member."""
        member = self._free.pop(0) if self._free else await self._wait(tenant)
        self._turn += 1
        self._served[tenant] = self._turn
        try:
            yield member
        finally:
            self._pass_on(member)

    async def _wait(self, tenant: str) -> T:
        turn: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was lent at the same moment
                self._pass_on(turn.result())
            raise

    def _pass_on(self, member: T) -> None:
        while self._waiting:
            tenant = min(self._waiting, key=lambda name: self._served.get(name, 0))
            line = self._waiting[tenant]
            turn = line.popleft()
            if not line:
                del self._waiting[tenant]
            if not turn.done():
                turn.set_result(member)
                return
        self._free.append(member)
        self._served.clear()  # no request waits, so the past order is irrelevant
