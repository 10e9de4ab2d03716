"""The cache manager allocates the pages of the key-value cache and the prefixes in them."""

from __future__ import annotations

import msgspec

from actors.runtime import Message
from kernels.contract.caches import GroupPages, PageRun

__all__ = [
    "AllocatePages",
    "AllocatedPages",
    "CacheProtocol",
    "CacheUpdate",
    "CacheUpdated",
    "CacheUsage",
    "CommitTokens",
    "FlushCache",
    "GroupUsage",
    "OpenSequence",
    "PeekPrefixes",
    "PrefixMatch",
    "ResetCache",
]


class CacheProtocol:
    """Allocates the pages of the key-value cache and keeps the radix tree over them."""


class PrefixMatch(msgspec.Struct, frozen=True):
    """The longest cached prefix, locked for a sequence. ``available``: pages free or evictable after it."""

    pages: bytes  # int32
    cached: int  # tokens, a multiple of the page size, less than the sequence's length
    available: int
    bounded: tuple[PageRun, ...] = ()  # of each bounded cache group, the pages that the next step reads


class OpenSequence(Message[CacheProtocol, PrefixMatch], frozen=True):
    sequence: int
    tokens: bytes  # int32, everything known of the sequence
    salt: bytes = b""
    use_cache: bool = True  # False: take no prefix (prompt log-probabilities need every position computed)


class AllocatePages(msgspec.Struct, frozen=True, array_like=True):
    sequence: int
    pages: int


class AllocatedPages(msgspec.Struct, frozen=True, array_like=True):
    sequence: int
    pages: bytes  # int32
    bounded: tuple[bytes, ...] = ()  # of each bounded cache group, the pages for these tokens, int32


class CommitTokens(msgspec.Struct, frozen=True, array_like=True):
    """``tokens`` follow those of earlier commits; keys and values of the first ``computed`` of all are in the pages."""

    sequence: int
    tokens: bytes  # int32
    computed: int


class CacheUpdated(msgspec.Struct, frozen=True):
    allocated: tuple[AllocatedPages, ...]
    available: int


class CacheUpdate(Message[CacheProtocol, CacheUpdated], frozen=True):
    """All that a step changes, in this order: commits, closed sequences (their pages are freed or
    left to the tree), allocations.

    Only the scheduler sends it, and requests at most ``available`` pages, so all are allocated. Pages of the
    bounded groups come with those of the main table; the scheduler admits no more sequences than they suffice for.
    """

    commits: tuple[CommitTokens, ...] = ()
    closed: tuple[int, ...] = ()
    allocations: tuple[AllocatePages, ...] = ()


class PeekPrefixes(Message[CacheProtocol, list[int]], frozen=True):
    """Cached tokens of each of these sequences, nothing locked: for the lpm policy."""

    tokens: tuple[bytes, ...]
    salts: tuple[bytes, ...]


class ResetCache(Message[CacheProtocol, None], frozen=True):
    """Forget everything: the device's cache is new. ``num_pages``, of the main page table, counts page 0, which is
    never given out. ``bounded``: the groups with page tables of their own."""

    num_pages: int
    page_size: int
    bounded: tuple[GroupPages, ...] = ()


class FlushCache(Message[CacheProtocol, bool], frozen=True):
    """Drop every unlocked prefix; True when the tree is empty afterwards."""


class GroupUsage(msgspec.Struct, frozen=True):
    """Pages of a bounded group: ``free + evictable + used == total``. ``kind``: of its spec. ``evicted`` counts."""

    kind: str
    total: int
    free: int
    evictable: int
    used: int
    evicted: int


class CacheUsage(msgspec.Struct, frozen=True):
    """Pages of the main table: ``free + evictable + used == total``. Tokens: counted since the start."""

    page_size: int = 0
    total: int = 0
    free: int = 0
    evictable: int = 0
    used: int = 0
    sequences: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0
    bounded: tuple[GroupUsage, ...] = ()

    def main(self) -> GroupUsage:
        """The main table, as a group."""
        return GroupUsage("main", self.total, self.free, self.evictable, self.used, self.evicted_pages)

    def groups(self) -> dict[str, GroupUsage]:
        """The main table as group ``main`` and the bounded groups by their kinds, a second of one kind as ``kind-2``.
        Empty where the main table serves the whole model."""
        if not self.bounded:
            return {}
        result = {"main": self.main()}
        for group in self.bounded:
            same = sum(other.kind == group.kind for other in result.values())
            result[group.kind if same == 0 else f"{group.kind}-{same + 1}"] = group
        return result
