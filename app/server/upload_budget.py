"""Bytes of bodies that have begun to arrive, over all connections: no client can hold much of the memory with them."""

from __future__ import annotations

from collections import Counter

__all__ = ["FREE", "LIMIT", "UploadBudget"]

LIMIT = 256 << 20
"""Bytes that unfinished bodies take together."""

FREE = 16 << 10
"""Bytes of each body that do not count, so that an owner without a free share can still send short chats."""


class UploadBudget:
    """A share of ``limit`` bytes for each owner of unfinished bodies: as much as is still free.

    One owner alone gets half, two get a third each, and there is always something left for the next one ("Dynamic
    queue length thresholds for shared-memory packet switches", Choudhury and Hahne, 1998).
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._total = 0
        self._held: Counter[str] = Counter()

    def take(self, owner: str, size: int) -> bool:
        """Take ``size`` bytes, unless the share of ``owner`` has not so many left."""
        if self._held[owner] + size > self._limit - self._total - size:
            if not self._held[owner]:
                del self._held[owner]
            return False
        self._held[owner] += size
        self._total += size
        return True

    def give_back(self, owner: str, size: int) -> None:
        self._total -= size
        self._held[owner] -= size
        if not self._held[owner]:
            del self._held[owner]
