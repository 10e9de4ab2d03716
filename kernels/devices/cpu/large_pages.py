"""Memory that a system can give in large pages, whole."""

from __future__ import annotations

import contextlib
import math
import mmap
import threading

import torch
from torch import Tensor

__all__ = ["LARGE_PAGE", "empty_large", "zeros"]

LARGE_PAGE = 2 << 20

_WORTH_IT = 1 << 15
"""Bytes of one of many parts that are filled one by one, from which on large pages are worth what they round up."""


_SMALL = 1 << 16
"""Bytes of a weight from which on large pages are worth their request."""

_CACHE_LINE = 64


class _SharedMemory:
    """Mappings of ``size`` bytes in large pages, each for many weights."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """uint8 [size], from the start of a cache line. Its mapping lives as long as any weight in it."""
        with self._lock:
            if len(self._left) < size:
                self._left = _mapped(self.size)
            whole = -(-size // _CACHE_LINE) * _CACHE_LINE
            taken, self._left = self._left[:size], self._left[whole:]
            return taken


_shared = _SharedMemory(32 << 20)


def empty_large(size: int, dtype: torch.dtype) -> Tensor:
    """[size], in large pages: from the start of one, or, as experts have many weights that fill none or few, behind
    another weight. An allocator's memory begins anywhere, which leaves up to two large pages of every weight in small
    ones. Who writes to what has memory of its own requests large pages before."""
    needed = size * dtype.itemsize
    if needed < _SMALL:
        return torch.empty(size, dtype=dtype)
    if needed < _shared.size // 8:
        return _shared.take(needed).view(dtype)
    return _mapped(needed, advise=False).view(dtype)


def _mapped(size: int, *, advise: bool = True) -> Tensor:
    """uint8 [size] from the start of a large page, taken from the system as it is first written. ``advise``: request
    large pages."""
    memory = mmap.mmap(-1, size + LARGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if advise and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    result = torch.frombuffer(memory, dtype=torch.uint8)
    start = -result.data_ptr() % LARGE_PAGE
    return result[start : start + size]


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """``shape[0]`` parts, in memory as it comes from the system, taken as they are first written; torch's would be
    written at once."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if math.prod(shape[1:]) * dtype.itemsize >= _WORTH_IT and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
