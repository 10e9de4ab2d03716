"""Pure data structures of the key-value cache: the page pool, the radix tree over pages, and both as one prefix cache."""

from __future__ import annotations

from actors.caching.prefix_cache import PrefixCache

__all__ = ["PrefixCache"]
