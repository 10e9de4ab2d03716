"""Which batch sizes of the decode graphs are captured for."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["graph_sizes"]


def graph_sizes(asked: Sequence[int], most: int, max_rows: int) -> list[int]:
    """Rows of each graph, ascending. ``asked``: a list of sizes, or none for 1, 2, 4 and the multiples of 8 up to
    ``most``, then of 16 above 64. None is larger than what ``max_rows`` rows need.
    """
    sizes = asked or [size for size in (1, 2, 4, *range(8, 65, 8), *range(80, most + 1, 16), most) if size <= most]
    enough = min((size for size in sizes if size >= max_rows), default=max(sizes, default=0))
    return sorted({size for size in sizes if 0 < size <= enough})
