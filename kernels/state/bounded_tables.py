"""The page tables of bounded cache groups, by slot."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.contract.caches import GroupPages, PageRun
from kernels.core.arrays import Ints, Longs
from kernels.state.slot_error import SlotError

__all__ = ["BoundedTable"]


class BoundedTable:
    """The table of one group: column ``i`` of a slot is the page of tokens ``i * page_tokens ..``.

    The cache reclaims the pages of columns that no further step reads without a notification: ``rows`` leaves them out.
    """

    def __init__(self, group: GroupPages, max_slots: int, max_length: int) -> None:
        self.group = group
        self.pages: Ints = np.zeros((max_slots, -(-max_length // group.page_tokens)), dtype=np.int32)
        self.ends: Longs = np.zeros(max_slots, dtype=np.int64)  # number of granted columns, including reclaimed ones

    def admit(self, slot: int, run: PageRun) -> None:
        """Set the slot's first pages. Raises SlotError."""
        self.pages[slot] = 0
        self.ends[slot] = run.first
        self.append(slot, np.frombuffer(run.pages, dtype=np.int32))

    def append(self, slot: int, pages: Ints) -> None:
        """Append pages of the next columns. Raises SlotError."""
        if not len(pages):
            return
        end = int(self.ends[slot])
        if end + len(pages) > self.pages.shape[1]:
            raise SlotError(f"{end + len(pages)} columns are more than a sequence needs")
        if pages.min() < 1 or pages.max() >= self.group.num_pages:
            raise SlotError(f"page ids must be 1 to {self.group.num_pages - 1}")
        self.pages[slot, end : end + len(pages)] = pages
        self.ends[slot] = end + len(pages)

    def holds(self, slots: Longs | Ints, lengths: Longs) -> npt.NDArray[np.bool_]:
        """Whether each slot's columns hold ``lengths`` tokens."""
        result: npt.NDArray[np.bool_] = self.ends[slots] * self.group.page_tokens >= lengths
        return result

    def rows(self, slots: Longs, starts: Longs, counts: Longs) -> Ints:
        """int32 [rows, columns]: the pages that rows of ``counts`` tokens from ``starts`` on read and write; the null
        page in all other columns."""
        size = self.group.page_tokens
        first = np.maximum(starts - self.group.lookback, 0) // size
        last = (starts + counts - 1) // size
        columns = np.arange(int(last.max()) + 1)
        inside = (columns >= first[:, None]) & (columns <= last[:, None])
        result: Ints = np.where(inside, self.pages[slots, : len(columns)], 0).astype(np.int32)
        return result

    def pages_between(self, slot: int, first: int, last: int) -> list[int]:
        """The pages of the columns of positions ``first .. last`` of a slot."""
        size = self.group.page_tokens
        result: list[int] = self.pages[slot, first // size : last // size + 1].tolist()
        return result
