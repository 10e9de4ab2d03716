"""Memory that a system can give in large pages, whole."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor

__all__ = ["LARGE_PAGE", "empty_large", "zeros"]

LARGE_PAGE = 2 << 20

_WORTH_IT = 1 << 15
"""Bytes of one of many parts that are filled one by one, from which on large pages are worth what they round up."""


def empty_large(size: int, dtype: torch.dtype) -> Tensor:
    """[size], from the start of a large page if it fills one. An allocator's memory begins anywhere, which leaves up to
    two large pages of every weight in small ones. The caller requests large pages before it writes."""
    needed = size * dtype.itemsize
    if needed < LARGE_PAGE:
        return torch.empty(size, dtype=dtype)
    memory = torch.frombuffer(
        mmap.mmap(-1, needed + LARGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8
    )
    start = -memory.data_ptr() % LARGE_PAGE
    return memory[start : start + needed].view(dtype)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """``shape[0]`` parts, in memory as it comes from the system, taken as they are first written; torch's would be
    written at once."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if math.prod(shape[1:]) * dtype.itemsize >= _WORTH_IT and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
