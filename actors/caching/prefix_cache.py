"""The prefix cache: the pages of each open sequence, and the tree of prefixes that sequences share.

A sequence's pages are first those it shares (in the tree, locked), then its own. As it runs, full pages whose contents
are certain move from the second part into the first; when it closes the rest of them go to the tree, and what remains
is freed. No page is copied, and a running sequence keeps its pages, so the device's page tables stay valid.

Bounded groups (windows, states) have pages of their own (:class:`BoundedPages`). They follow the main table: their
pages come and go with the same messages, and a prefix counts as cached only where every group can go on.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from actors.caching.bounded_pages import BoundedPages
from actors.caching.page_pool import TREE, CacheCorrupted, PagePool
from actors.caching.radix_tree import Node, RadixTree
from actors.protocol import (
    AllocatedPages,
    AllocatePages,
    CacheUpdate,
    CacheUpdated,
    CacheUsage,
    CommitTokens,
    OpenSequence,
    PeekPrefixes,
    PrefixMatch,
)
from kernels.contract.caches import GroupPages, PageRun

__all__ = ["PrefixCache"]

_TOKEN_BYTES = 4


class _Open:
    """An open sequence: ``pages[:shared]`` are the path to ``node``, ``tail`` the tokens known after them."""

    __slots__ = ("computed", "node", "pages", "shared", "tail")

    def __init__(self, node: Node | None, pages: list[int], tail: bytes, page_size: int) -> None:
        self.node = node
        self.pages = pages
        self.shared = len(pages)
        self.tail = bytearray(tail)  # int32
        self.computed = len(pages) * page_size  # tokens certainly in the pages


class PrefixCache:
    """Pages ``1 .. num_pages - 1`` of ``page_size`` tokens, allocated to sequences and shared by prefix.

    ``bounded``: the groups that have pages of their own. ``policy``: what is evicted first (:class:`RadixTree`).
    ``enabled=False`` shares nothing. Errors are ValueError (a sequence is not known, or known already) and
    CacheCorrupted: both are defects of the caller, which owns the sequences' numbers and knows what is available.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        policy: Literal["lru", "lfu"] = "lru",
        enabled: bool = True,
        bounded: tuple[GroupPages, ...] = (),
    ) -> None:
        self._policy = policy
        self._enabled = enabled
        self._queried = 0
        self._hits = 0
        self._evicted = 0
        self.reset(num_pages, page_size, bounded)

    def reset(self, num_pages: int, page_size: int, bounded: tuple[GroupPages, ...] = ()) -> None:
        """Forget everything but the counters: the device's cache is new."""
        if page_size < 1:
            raise ValueError(f"a page of {page_size} tokens holds none")
        self._page_size = page_size
        self._page_bytes = page_size * _TOKEN_BYTES
        self._pool = PagePool(num_pages)
        self._tree = RadixTree(page_size, policy=self._policy)
        self._open: dict[int, _Open] = {}
        self._bounded = BoundedPages(page_size, bounded) if bounded else None

    @property
    def available(self) -> int:
        """Pages free or evictable."""
        return self._pool.free + self._tree.evictable

    def open(self, message: OpenSequence) -> PrefixMatch:
        """Lock the longest cached prefix for a sequence; at least its last token is left to be computed."""
        if message.sequence in self._open:
            raise ValueError(f"sequence {message.sequence} is open already: close it before it is opened again")
        length = len(message.tokens) // _TOKEN_BYTES
        node: Node | None = None
        pages: list[int] = []
        runs: tuple[PageRun, ...] = ()
        if self._enabled:
            limit = max(length - 1, 0) // self._page_size if message.use_cache else 0
            if self._bounded is not None:
                limit = self._tree.peek(message.salt, message.tokens, limit)
                limit, runs = self._bounded.open(message.sequence, message.salt, message.tokens, limit)
            node, pages = self._tree.acquire(message.salt, message.tokens, limit)
        elif self._bounded is not None:
            runs = self._bounded.open_unshared(message.sequence)
        if message.use_cache:
            self._queried += length
            self._hits += len(pages) * self._page_size
        tail = message.tokens[len(pages) * self._page_bytes :]
        self._open[message.sequence] = _Open(node, pages, tail, self._page_size)
        cached = len(pages) * self._page_size
        return PrefixMatch(pages=_pack(pages), cached=cached, available=self.available, bounded=runs)

    def update(self, message: CacheUpdate) -> CacheUpdated:
        """Commits, then closes, then allocations.

        The first two never lower ``available``, so pages within the last reported ``available`` are always allocated.
        """
        for commit in message.commits:
            self._commit(commit)
        for sequence in message.closed:
            self._close(sequence)
        allocated = tuple([self._allocate(request) for request in message.allocations])
        return CacheUpdated(allocated=allocated, available=self.available)

    def peek(self, message: PeekPrefixes) -> list[int]:
        """Tokens an ``open`` of each sequence would find cached now."""
        if not self._enabled:
            return [0] * len(message.tokens)
        result = [
            self._tree.peek(salt, tokens, max(len(tokens) // _TOKEN_BYTES - 1, 0) // self._page_size)
            for tokens, salt in zip(message.tokens, message.salts, strict=True)
        ]
        if self._bounded is not None:
            result = [
                self._bounded.peek(salt, tokens, limit)
                for tokens, salt, limit in zip(message.tokens, message.salts, result, strict=True)
            ]
        return [pages * self._page_size for pages in result]

    def flush(self) -> bool:
        """Drop every prefix without a holder; True when none is left."""
        self._pool.release(self._tree.evict(self._tree.evictable), TREE)
        if self._bounded is not None:
            self._bounded.flush()
        return self._tree.size == 0

    def usage(self) -> CacheUsage:
        """Pages by state, and counters since the start."""
        free, evictable = self._pool.free, self._tree.evictable
        return CacheUsage(
            page_size=self._page_size,
            total=self._pool.total,
            free=free,
            evictable=evictable,
            used=self._pool.total - free - evictable,
            sequences=len(self._open),
            queried_tokens=self._queried,
            hit_tokens=self._hits,
            evicted_pages=self._evicted,
            bounded=self._bounded.usage() if self._bounded is not None else (),
        )

    def check(self) -> None:
        """Raise CacheCorrupted unless every page has exactly the owner that the sequences and the tree say."""
        self._pool.check()
        self._tree.check([entry.node for entry in self._open.values() if entry.node is not None])
        owned = self._pool.owned()
        in_tree = [page for node in self._tree.walk() for page in node.pages]
        _same_pages("the tree", in_tree, owned.pop(TREE, []))
        for sequence, entry in self._open.items():
            _same_pages(f"sequence {sequence}", entry.pages[entry.shared :], owned.pop(sequence, []))
            path = [] if entry.node is None else self._tree.path_pages(entry.node)
            if path != entry.pages[: entry.shared]:
                raise CacheCorrupted(f"sequence {sequence} shares {entry.pages[: entry.shared]}, its path is {path}")
            if not entry.shared * self._page_size <= entry.computed <= len(entry.pages) * self._page_size:
                raise CacheCorrupted(f"sequence {sequence} has {entry.computed} computed tokens in no page of its own")
        if owned:
            raise CacheCorrupted(f"pages are owned by sequences that are not open: {owned}")
        if self._bounded is not None:
            self._bounded.check({sequence: (len(e.pages), e.computed) for sequence, e in self._open.items()})

    def _commit(self, commit: CommitTokens) -> None:
        entry = self._entry(commit.sequence)
        entry.tail += commit.tokens
        known = entry.shared * self._page_size + len(entry.tail) // _TOKEN_BYTES
        if not entry.computed <= commit.computed <= min(known, len(entry.pages) * self._page_size):
            raise CacheCorrupted(
                f"sequence {commit.sequence} commits {commit.computed} tokens after {entry.computed}, "
                f"with {known} known and {len(entry.pages)} pages"
            )
        entry.computed = commit.computed
        if self._bounded is not None:
            self._bounded.commit(commit.sequence, commit.tokens, commit.computed)
        if entry.node is None:
            return
        full = commit.computed // self._page_size
        if full <= entry.shared:
            return
        pages = entry.pages[entry.shared : full]
        tokens = bytes(entry.tail[: len(pages) * self._page_bytes])
        entry.node, taken, displaced = self._tree.extend(entry.node, tokens, pages)
        self._pool.transfer(pages[:taken], commit.sequence, TREE)
        self._pool.release(displaced, TREE)
        entry.shared += taken
        del entry.tail[: taken * self._page_bytes]

    def _close(self, sequence: int) -> None:
        entry = self._entry(sequence)
        full = entry.shared
        if entry.node is not None:
            full = max(full, entry.computed // self._page_size)
            pages = entry.pages[entry.shared : full]
            tokens = bytes(entry.tail[: len(pages) * self._page_bytes])
            self._pool.transfer(pages, sequence, TREE)
            self._pool.release(self._tree.leave(entry.node, tokens, pages), TREE)
        self._pool.release(entry.pages[full:], sequence)
        if self._bounded is not None:
            self._bounded.close(sequence)
        del self._open[sequence]

    def _allocate(self, request: AllocatePages) -> AllocatedPages:
        entry = self._entry(request.sequence)
        short = request.pages - self._pool.free
        if short > 0:
            evicted = self._tree.evict(short)
            self._evicted += len(evicted)
            self._pool.release(evicted, TREE)
        pages = self._pool.allocate(request.pages, request.sequence)
        entry.pages += pages
        if self._bounded is None:
            return AllocatedPages(sequence=request.sequence, pages=_pack(pages))
        bounded = self._bounded.request(request.sequence, len(entry.pages))
        return AllocatedPages(sequence=request.sequence, pages=_pack(pages), bounded=bounded)

    def _entry(self, sequence: int) -> _Open:
        entry = self._open.get(sequence)
        if entry is None:
            raise ValueError(f"sequence {sequence} is not open: open it first")
        return entry


def _pack(pages: list[int]) -> bytes:
    return np.array(pages, dtype=np.int32).tobytes()


def _same_pages(name: str, held: list[int], owned: list[int]) -> None:
    if len(held) != len(owned) or set(held) != set(owned):
        raise CacheCorrupted(f"{name} holds pages {sorted(held)} and owns {sorted(owned)}")
