"""The pages that a step reads, each once: what is made floats of, where a cache is kept in fewer bits."""

from __future__ import annotations

import numpy as np

from kernels.core.arrays import Ints, Longs

__all__ = ["kept_pages"]


def kept_pages(pages: Ints, lengths: Longs, page_size: int, first: Longs | None = None) -> tuple[Ints, Longs]:
    """A table like ``pages`` [rows, columns] of the numbers that the pages have among those that are read, and these.

    ``lengths`` [rows]: tokens of each row; ``first`` [rows]: the first that is read, 0 when None.
    """
    column = np.arange(pages.shape[1])
    read = column < -(-lengths // page_size)[:, None]
    if first is not None:
        read &= column >= (first // page_size)[:, None]
    result, place = np.unique(pages[read], return_inverse=True)
    table = np.zeros(pages.shape, dtype=np.int32)
    table[read] = place
    return table, result.astype(np.int64)
