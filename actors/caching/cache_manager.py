"""The CacheManager actor: allocates the cache's pages and keeps the prefix tree over them."""

from __future__ import annotations

from typing import Literal

from actors.boards.health_board import HealthBoard
from actors.caching.prefix_cache import PrefixCache
from actors.protocol import (
    CacheProtocol,
    CacheUpdate,
    CacheUpdated,
    CacheUsage,
    FlushCache,
    OpenSequence,
    PeekPrefixes,
    PrefixMatch,
    ResetCache,
)
from actors.runtime import Actor, handles

__all__ = ["CacheManager"]


class CacheManager(Actor[CacheProtocol]):
    """A thin shell around :class:`PrefixCache`. It handles page ids and token ids, no tensors."""

    def __init__(
        self, board: HealthBoard, *, use_radix_cache: bool = True, policy: Literal["lru", "lfu"] = "lru"
    ) -> None:
        self._use_radix_cache = use_radix_cache
        self._policy = policy
        self._made: PrefixCache | None = None
        board.read_cache = self._read_usage

    @property
    def _cache(self) -> PrefixCache:
        if self._made is None:
            raise RuntimeError("ResetCache must come first: no worker has reported how many pages its device holds.")
        return self._made

    def _read_usage(self) -> CacheUsage:
        return self._made.usage() if self._made is not None else CacheUsage()

    @handles
    def reset(self, message: ResetCache) -> None:
        self._made = PrefixCache(
            message.num_pages,
            message.page_size,
            policy=self._policy,
            enabled=self._use_radix_cache,
            bounded=message.bounded,
        )

    @handles
    def open(self, message: OpenSequence) -> PrefixMatch:
        return self._cache.open(message)

    @handles
    def update(self, message: CacheUpdate) -> CacheUpdated:
        return self._cache.update(message)

    @handles
    def peek(self, message: PeekPrefixes) -> list[int]:
        return self._cache.peek(message)

    @handles
    def flush(self, message: FlushCache) -> bool:
        return self._made is None or self._made.flush()
