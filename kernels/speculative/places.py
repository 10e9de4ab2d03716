"""Where guesses lie in a draft's cache: behind the tokens that are known, where the next observation writes over them.

They may need more places than the sequence has pages for: each slot has pages of its own behind the cache's for these.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.platforms.base import Platform

__all__ = ["DraftPlaces"]

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

_GIVEN = 2  # places that a row's own pages have at least: its root's, and that of one guess


class DraftPlaces:
    """The places of up to ``places`` guesses of a row, from ``first`` positions behind its root on."""

    def __init__(self, platform: Platform, page_size: int, slots: int, places: int, first: int = 0) -> None:
        self._platform, self._page_size, self._slots, self._first = platform, page_size, slots, first
        self._spare = max(0, -(-(first + places - _GIVEN) // page_size))
        self._begin = 0

    def cache_pages(self, pages: int) -> int:
        """The pages that a cache must have where the target's has ``pages``."""
        self._begin = pages
        return pages + self._spare * self._slots

    @property
    def spare_tokens(self) -> int:
        """Places that a cache has beside those of the target's pages."""
        return self._spare * self._slots * self._page_size

    @property
    def own(self) -> tuple[int, int]:
        """The first page that is a slot's own, slot 0's, and how many each slot has."""
        return self._begin, self._spare

    def table(self, slots: Longs, roots: Longs, given: Ints, capacity: Longs, places: int) -> Ints:
        """int32 [rows, columns]: the pages of ``places`` guesses and of all before them.

        ``given`` int32 [rows, columns]: the target's, of which ``capacity`` positions hold something.
        """
        last = int(roots.max()) + self._first + places - 1
        columns = max(0, last) // self._page_size + 1
        if last < int(capacity.min()) and columns <= given.shape[1]:
            return given[:, :columns]
        pages = np.zeros((len(slots), columns), dtype=np.int32)
        own = given[:, :columns]
        pages[:, : own.shape[1]] = own
        beyond = np.arange(columns) - (capacity // self._page_size)[:, None]
        if not self._spare:
            return np.where(beyond >= 0, 0, pages).astype(np.int32)  # columns that longer rows have
        spare = self._begin + self._spare * slots[:, None] + np.minimum(beyond, self._spare - 1)
        return np.where(beyond >= 0, spare, pages).astype(np.int32)

    def put(self, positions: Longs, places: Longs, table: Ints) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """``positions`` int64 [passes, rows * n], and where ``places`` [passes, rows * n] lie in the cache, both on the
        device, apart by passes."""
        rows = np.repeat(np.arange(len(table)), places.shape[1] // len(table))
        pages, offsets = np.divmod(places, self._page_size)
        both = np.stack((positions, table[rows, pages] * np.int64(self._page_size) + offsets))
        found = self._platform.put(both.reshape(-1, places.shape[1])).unbind(0)
        return found[: len(places)], found[len(places) :]
