"""Pure data structures of the key-value cache: the page pool, the radix tree, and both as one prefix cache."""

from __future__ import annotations

from actors.caching.page_pool import CacheCorrupted
from actors.caching.prefix_cache import PrefixCache

__all__ = ["CacheCorrupted", "PrefixCache"]
