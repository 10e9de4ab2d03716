"""Arrays of the host: views of packed messages, and consecutive indices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["Bools", "Ints", "Longs", "ragged", "unpack_ints"]

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


def unpack_ints(data: bytes) -> Ints:
    """A read-only view of packed int32."""
    return np.frombuffer(data, dtype=np.int32)


def ragged(begins: Longs, counts: Longs) -> Longs:
    """``begins[0] .. begins[0] + counts[0] - 1``, then the same range of the next entry; int64 [sum(counts)]."""
    ends = np.cumsum(counts)
    result: Longs = np.arange(int(ends[-1])) + np.repeat(begins - (ends - counts), counts)
    return result
