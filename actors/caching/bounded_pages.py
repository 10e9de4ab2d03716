"""Pages of bounded cache groups: windows and states, of which a sequence holds a limited number.

A page table of such a group has columns of ``page_tokens`` tokens each. To go on at position ``n`` a sequence needs the
columns of the ``lookback`` tokens before ``n``: those of its window, or the one with the state after token ``n - 1``.
As tokens are computed, columns before that are freed while the sequence runs.

A full page never changes again. It is kept under the key of its prefix, a chained hash over all tokens up to its end,
and can be shared from then on. A page without a holder is evicted when another one is needed, the least recently held
first. Main pages live in a radix tree; here a prefix has pages in few places, so that a table by hash is simpler.
"""

from __future__ import annotations

from collections import deque
from hashlib import blake2b

import numpy as np

from actors.caching.page_pool import CacheCorrupted
from actors.protocol import GroupUsage
from kernels.contract.caches import GroupPages, PageRun

__all__ = ["BoundedPages"]

_TOKEN_BYTES = 4
_KEY_BYTES = 16


class _Prefix:
    """The keys of a sequence's full main pages, and the tokens after them."""

    __slots__ = ("keys", "tail")

    def __init__(self, keys: list[bytes], tail: bytes) -> None:
        self.keys = keys
        self.tail = tail


class BoundedPages:
    """The pages of all bounded groups of a model. ``page_size``: tokens of a main page.

    Errors are ValueError (a group does not fit the main pages) and CacheCorrupted, a defect of the caller.
    """

    def __init__(self, page_size: int, groups: tuple[GroupPages, ...]) -> None:
        self._page_size = page_size
        self._page_bytes = page_size * _TOKEN_BYTES
        self._groups = [_Group(group, page_size) for group in groups]
        self._prefixes: dict[int, _Prefix | None] = {}  # by sequence; None: it shares nothing

    def open(self, sequence: int, salt: bytes, tokens: bytes, limit: int) -> tuple[int, tuple[PageRun, ...]]:
        """Hold the pages of the longest prefix of at most ``limit`` main pages from which every group can go on.

        Returns the prefix's main pages, and the columns that each group reads next.
        """
        keys = self._extend([self._seed(salt)], tokens)
        result = self._longest(keys, limit)
        self._prefixes[sequence] = _Prefix(keys, tokens[(len(keys) - 1) * self._page_bytes :])
        return result, tuple([group.open(sequence, keys, result * self._page_size) for group in self._groups])

    def open_unshared(self, sequence: int) -> tuple[PageRun, ...]:
        """``open`` for a sequence that shares nothing."""
        self._prefixes[sequence] = None
        return tuple([group.open(sequence, [], 0) for group in self._groups])

    def peek(self, salt: bytes, tokens: bytes, limit: int) -> int:
        """Main pages that ``open`` would find."""
        return self._longest(self._extend([self._seed(salt)], tokens[: limit * self._page_bytes]), limit)

    def commit(self, sequence: int, tokens: bytes, computed: int) -> None:
        """``tokens`` follow the known ones, ``computed`` of all are computed: full pages can be shared, and those that
        no further step reads are given back."""
        prefix = self._prefixes[sequence]
        keys: list[bytes] = []
        if prefix is not None:
            known = prefix.tail + tokens
            before = len(prefix.keys)
            keys = self._extend(prefix.keys, known)
            prefix.tail = known[(len(keys) - before) * self._page_bytes :]
        for group in self._groups:
            group.commit(sequence, keys, computed)

    def request(self, sequence: int, pages: int) -> tuple[bytes, ...]:
        """The sequence now has so many main ``pages``. Returns each group's new pages for them, int32."""
        return tuple([group.request(sequence, pages * self._page_size) for group in self._groups])

    def close(self, sequence: int) -> None:
        """The sequence ends; pages that can be shared stay until they are evicted."""
        del self._prefixes[sequence]
        for group in self._groups:
            group.close(sequence)

    def flush(self) -> None:
        """Evict every page without a holder."""
        for group in self._groups:
            group.flush()

    def usage(self) -> tuple[GroupUsage, ...]:
        """Pages by state, of each group."""
        return tuple([group.usage() for group in self._groups])

    def check(self, sequences: dict[int, tuple[int, int]]) -> None:
        """Raise CacheCorrupted unless every page is free, kept or held as the open ``sequences`` say: the main pages
        and the computed tokens of each. What a sequence holds begins with what its next step reads."""
        if set(self._prefixes) != set(sequences):
            raise CacheCorrupted(f"sequences {sorted(self._prefixes)} hold bounded pages, {sorted(sequences)} are open")
        for group in self._groups:
            group.check(sequences)

    def _longest(self, keys: list[bytes], limit: int) -> int:
        result = -1
        while result != limit:
            result = limit
            for group in self._groups:
                limit = group.longest(keys, limit)
        return result

    def _extend(self, keys: list[bytes], tokens: bytes) -> list[bytes]:
        """Append a key for each full page of ``tokens``; ``keys[n]`` is that of the first n main pages."""
        size, key = self._page_bytes, keys[-1]
        for start in range(0, len(tokens) - size + 1, size):
            key = blake2b(key + tokens[start : start + size], digest_size=_KEY_BYTES).digest()
            keys.append(key)
        return keys

    @staticmethod
    def _seed(salt: bytes) -> bytes:
        return blake2b(salt, digest_size=_KEY_BYTES).digest()


class _Columns:
    """What a sequence holds of a group: ``pages`` of the columns ``first ..``, shared ones below column ``kept``."""

    __slots__ = ("first", "kept", "pages")

    def __init__(self, first: int, pages: list[int]) -> None:
        self.first = first
        self.pages = deque(pages)
        self.kept = first + len(pages)

    @property
    def end(self) -> int:
        return self.first + len(self.pages)


class _Group:
    """The pages of one group. A page is free, idle (kept under a key, without a holder) or held."""

    def __init__(self, group: GroupPages, page_size: int) -> None:
        if group.page_tokens % page_size:
            raise ValueError(f"a page of {group.page_tokens} tokens is no multiple of a main page's {page_size}")
        if group.num_pages < 2:
            raise ValueError(f"a group of {group.num_pages} pages has no usable page: raise --max-total-tokens")
        self._tokens, self._lookback = group.page_tokens, group.lookback
        self._every = group.page_tokens // page_size  # main pages in a column
        self._kind = type(group.group.spec).__name__.lower()
        self._total = group.num_pages - 1
        self._free = list(range(self._total, 0, -1))
        self._holders = [0] * group.num_pages
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._idle: dict[int, None] = {}  # in order of eviction
        self._columns: dict[int, _Columns] = {}
        self._evicted = 0

    def longest(self, keys: list[bytes], limit: int) -> int:
        """Main pages, at most ``limit``, after which the group can go on with pages that it keeps."""
        column = limit // self._every
        while column > 0:
            first = max(column * self._tokens - self._lookback, 0) // self._tokens
            missing = next((at for at in range(column - 1, first - 1, -1) if not self._has(keys, at)), None)
            if missing is None:
                break
            column = missing  # no prefix that reads the missing column will do
        return column * self._every

    def open(self, sequence: int, keys: list[bytes], length: int) -> PageRun:
        first, end = max(length - self._lookback, 0) // self._tokens, length // self._tokens
        pages = [self._pages[keys[(column + 1) * self._every]] for column in range(first, end)]
        for page in pages:
            self._idle.pop(page, None)
            self._holders[page] += 1
        self._columns[sequence] = _Columns(first, pages)
        return PageRun(first, _pack(pages))

    def commit(self, sequence: int, keys: list[bytes], computed: int) -> None:
        held = self._columns[sequence]
        for column in range(held.kept, computed // self._tokens):
            if (column + 1) * self._every < len(keys):
                self._keep(keys[(column + 1) * self._every], held.pages[column - held.first])
        held.kept = max(held.kept, computed // self._tokens)
        while held.pages and held.first < max(computed - self._lookback, 0) // self._tokens:
            self._let_go(held.pages.popleft())
            held.first += 1

    def request(self, sequence: int, capacity: int) -> bytes:
        held = self._columns[sequence]
        pages = [self._allocate() for _ in range(held.end, -(-capacity // self._tokens))]
        held.pages += pages
        return _pack(pages)

    def close(self, sequence: int) -> None:
        for page in self._columns.pop(sequence).pages:
            self._let_go(page)

    def flush(self) -> None:
        while self._idle:
            self._free.append(self._evict())

    def usage(self) -> GroupUsage:
        free, idle = len(self._free), len(self._idle)
        return GroupUsage(self._kind, self._total, free, idle, self._total - free - idle, self._evicted)

    def check(self, sequences: dict[int, tuple[int, int]]) -> None:
        held: dict[int, int] = {}
        for sequence, columns in self._columns.items():
            pages, computed = sequences[sequence]
            for page in columns.pages:
                held[page] = held.get(page, 0) + 1
            needed = max(computed - self._lookback, 0) // self._tokens
            if columns.first != needed:
                raise CacheCorrupted(f"sequence {sequence} holds columns from {columns.first}, it needs {needed}")
            if columns.end < -(-computed // self._tokens) or pages < self._every * (columns.end - 1):
                raise CacheCorrupted(f"sequence {sequence} has columns to {columns.end} and {pages} main pages")
            for column, page in enumerate(columns.pages, columns.first):
                if column >= columns.kept and (self._holders[page] != 1 or page in self._keys):
                    raise CacheCorrupted(f"page {page} is written by sequence {sequence}, and shared")
        if any(self._holders[page] != held.get(page, 0) for page in range(self._total + 1)):
            raise CacheCorrupted(f"pages are held {held}, and counted {self._holders}")
        if {key: page for page, key in self._keys.items()} != self._pages:
            raise CacheCorrupted("keys and pages disagree")
        states = [set(self._free), set(self._idle), set(held)]
        if sum(map(len, states)) != self._total or set.union(*states) != set(range(1, self._total + 1)):
            raise CacheCorrupted(f"{self._total} pages are free, idle and held as {states}")
        if len(states[0]) != len(self._free) or not states[1] <= set(self._keys) or states[0] & set(self._keys):
            raise CacheCorrupted("a page is free twice, idle without a key, or free with one")

    def _has(self, keys: list[bytes], column: int) -> bool:
        at = (column + 1) * self._every
        return at < len(keys) and keys[at] in self._pages

    def _keep(self, key: bytes, page: int) -> None:
        """Share a full page. If another page has the same key, the held one is kept, as in the radix tree."""
        other = self._pages.get(key)
        if other is not None:
            if self._holders[other]:
                return
            del self._idle[other]
            del self._keys[other]
            self._free.append(other)
        self._pages[key], self._keys[page] = page, key

    def _let_go(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if page in self._keys:
            self._idle[page] = None
        else:
            self._free.append(page)

    def _allocate(self) -> int:
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page = self._evict()
            self._evicted += 1
        else:
            raise CacheCorrupted(f"all {self._total} pages of a {self._kind} group are held")
        self._holders[page] = 1
        return page

    def _evict(self) -> int:
        page = next(iter(self._idle))
        del self._idle[page]
        del self._pages[self._keys.pop(page)]
        return page


def _pack(pages: list[int]) -> bytes:
    return np.array(pages, dtype=np.int32).tobytes()
