"""The CacheManager actor: owner of the cache's pages and of the prefix tree over them."""

from __future__ import annotations

from actors.caching.prefix_cache import PrefixCache
from actors.protocol import (
    CacheProtocol,
    CacheTurn,
    CacheTurnDone,
    CacheUsage,
    CheckCache,
    FlushCache,
    GetCacheUsage,
    Lease,
    OpenSequence,
    PeekPrefixes,
    ResetCache,
)
from actors.runtime import Actor, handles
from actors.vitals import Vitals

__all__ = ["CacheManager"]


class CacheManager(Actor[CacheProtocol]):
    """A thin shell around :class:`PrefixCache`. It knows page ids and token ids, never a tensor."""

    def __init__(self, vitals: Vitals, *, page_size: int, use_radix_cache: bool = True) -> None:
        self._use_radix_cache = use_radix_cache
        # Page 0 only: nothing can be given out before a worker has said how many pages its device holds.
        self._cache = PrefixCache(1, page_size, enabled=use_radix_cache)
        vitals.read_cache = lambda: self._cache.usage()

    @handles
    def reset(self, message: ResetCache) -> None:
        self._cache = PrefixCache(message.num_pages, message.page_size, enabled=self._use_radix_cache)

    @handles
    def open(self, message: OpenSequence) -> Lease:
        return self._cache.open(message)

    @handles
    def turn(self, message: CacheTurn) -> CacheTurnDone:
        return self._cache.turn(message)

    @handles
    def peek(self, message: PeekPrefixes) -> list[int]:
        return self._cache.peek(message)

    @handles
    def flush(self, message: FlushCache) -> bool:
        return self._cache.flush()

    @handles
    def usage(self, message: GetCacheUsage) -> CacheUsage:
        return self._cache.usage()

    @handles
    def check(self, message: CheckCache) -> None:
        self._cache.check()
