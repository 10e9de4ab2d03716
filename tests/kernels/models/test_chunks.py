"""Rows that end where chunks of positions do."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.core.attention_rows import AttentionRows


def rows(*parts: tuple[int, int], decodes: int = 0, verifies: int = 0) -> AttentionRows:
    starts, counts = np.array(parts, dtype=np.int64).T
    pages = np.arange(1, 1 + 6 * len(parts), dtype=np.int32).reshape(len(parts), 6)
    return AttentionRows(starts, counts, pages, decodes, verifies)


def test_rows_are_cut_where_chunks_end() -> None:
    cut = rows((7, 1), (8, 1), (5, 13), decodes=2).in_chunks(8, 4)
    assert cut.starts.tolist() == [7, 0, 5, 0, 0]
    assert cut.counts.tolist() == [1, 1, 3, 8, 2]
    assert cut.pages.tolist() == [[1, 2], [9, 10], [13, 14], [15, 16], [17, 18]]
    assert cut.decodes == 2


def test_chunks_beyond_the_last_page_read_the_null_page() -> None:
    cut = rows((16, 8)).in_chunks(16, 4)
    assert cut.pages.tolist() == [[5, 6]]
    assert rows((0, 24)).in_chunks(16, 4).pages.tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]


@pytest.mark.parametrize(("size", "verifies"), [(6, 0), (8, 1)])
def test_rows_that_cannot_be_cut_are_refused(size: int, verifies: int) -> None:
    with pytest.raises(ValueError, match="cannot be cut"):
        rows((0, 4), verifies=verifies).in_chunks(size, 4)
