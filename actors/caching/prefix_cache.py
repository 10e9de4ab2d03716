"""The prefix cache: which pages each open sequence holds, and the radix tree of finished prefixes."""

from __future__ import annotations

from actors.protocol import CacheTurn, CacheTurnDone, CacheUsage, Lease, OpenSequence, PeekPrefixes

__all__ = ["PrefixCache"]


class PrefixCache:
    """Pages ``1 .. num_pages - 1`` of ``page_size`` tokens, lent to sequences and shared by prefix."""

    def __init__(self, num_pages: int, page_size: int, *, enabled: bool = True) -> None: ...

    def reset(self, num_pages: int, page_size: int) -> None:
        """Forget everything: the device's cache is new."""

    def open(self, message: OpenSequence) -> Lease: ...

    def turn(self, message: CacheTurn) -> CacheTurnDone: ...

    def peek(self, message: PeekPrefixes) -> list[int]: ...

    def flush(self) -> bool: ...

    def usage(self) -> CacheUsage: ...

    def check(self) -> None: ...
