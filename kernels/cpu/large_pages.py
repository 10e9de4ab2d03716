"""Memory that a system can give in large pages, whole."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

__all__ = ["LARGE_PAGE", "empty_large"]

LARGE_PAGE = 2 << 20


def empty_large(size: int, dtype: torch.dtype) -> Tensor:
    """[size], from the start of a large page on where it fills one: an allocator's begins anywhere, which leaves up to
    two large pages of every weight in small ones. Who writes to it asks for large pages before."""
    needed = size * dtype.itemsize
    if needed < LARGE_PAGE:
        return torch.empty(size, dtype=dtype)
    memory = torch.frombuffer(
        mmap.mmap(-1, needed + LARGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8
    )
    start = -memory.data_ptr() % LARGE_PAGE
    return memory[start : start + needed].view(dtype)
