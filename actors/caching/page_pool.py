"""The pages of the device's key-value cache; each has at most one owner."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

__all__ = ["TREE", "CacheCorrupted", "PagePool"]

TREE = -1  # owner of pages that belong to the radix tree: they are never written
_FREE = -2


class CacheCorrupted(RuntimeError):
    """An invariant of the cache does not hold: a defect of this program, never of a request."""


class PagePool:
    """Pages ``1 .. num_pages - 1``; page 0 takes the writes of padded rows and is never allocated.

    A page is free, or has one owner: a sequence (a number >= 0), or the radix tree (:data:`TREE`). Only its owner can
    transfer it, so that two writers of one page raise an error instead of corrupting text.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a cache of {num_pages} pages has no usable page: raise --max-total-tokens")
        self.total = num_pages - 1
        self._owners = [_FREE] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def free(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    def allocate(self, count: int, owner: int) -> list[int]:
        """Allocate ``count`` pages to ``owner``. Raises CacheCorrupted when fewer are free."""
        free = self._free
        if count > len(free):
            raise CacheCorrupted(f"{count} pages requested, {len(free)} are free")
        if count <= 0:
            return []
        pages = free[-count:]
        del free[-count:]
        for page in pages:
            self._owners[page] = owner
        return pages

    def release(self, pages: Iterable[int], owner: int) -> None:
        """Take pages back from their ``owner``."""
        owners, free, total = self._owners, self._free, self.total
        for page in pages:
            if not 0 < page <= total or owners[page] != owner:
                self._refuse(page, owner)
            owners[page] = _FREE
            free.append(page)

    def transfer(self, pages: Iterable[int], owner: int, to: int) -> None:
        """Transfer pages of ``owner`` to another one."""
        owners, total = self._owners, self.total
        for page in pages:
            if not 0 < page <= total or owners[page] != owner:
                self._refuse(page, owner)
            owners[page] = to

    def owned(self) -> dict[int, list[int]]:
        """Pages by owner, the free ones left out."""
        result: dict[int, list[int]] = {}
        for page, owner in enumerate(self._owners):
            if page and owner != _FREE:
                result.setdefault(owner, []).append(page)
        return result

    def check(self) -> None:
        """Raise CacheCorrupted unless the free list and the owners agree."""
        unowned = {page for page, owner in enumerate(self._owners) if page and owner == _FREE}
        if len(self._free) != len(unowned) or set(self._free) != unowned:
            raise CacheCorrupted(f"free list {sorted(self._free)} but unowned pages {sorted(unowned)}")
        if self._owners[0] != _FREE:
            raise CacheCorrupted("page 0 was allocated")

    def _refuse(self, page: int, owner: int) -> NoReturn:
        found = self._owners[page] if 0 < page <= self.total else None
        raise CacheCorrupted(f"page {page} belongs to {found}, not to {owner}")
