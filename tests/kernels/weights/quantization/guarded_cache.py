"""Attends to the last tokens of caches of 8 bits with nothing behind them: a program, for it dies if that is read."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kernels.core.attention_rows import AttentionRows
from kernels.devices.cpu.cache_8bit import Pages8bit
from kernels.devices.cpu.device import CpuDevice
from kernels.weights.quantization.cache import LayerScales

__all__ = ["CASES"]

CASES = [
    (heads, kv_heads, tokens, threads, dtype, fixed)
    for heads, kv_heads, tokens, threads in (
        (28, 4, 1, 1),  # fourteen columns of two heads, and sixteen lanes
        (9, 3, 1, 1),  # nine columns, and lanes of twice as many heads
        (4, 2, 5, 1),  # a verification's ten columns of one head
        (3, 1, 1, 1),  # three columns, and four lanes
        (16, 16, 1, 8),  # a thread has two columns, of more heads than a vector of scales has room for
    )
    for dtype, fixed in ((torch.int8, False), (torch.float8_e4m3fn, False), (torch.int8, True))
]
"""``heads``, ``kv_heads``, ``tokens`` of one sequence, ``threads``, ``dtype``; ``fixed``: scales are of heads."""

_PROT_NONE = 0  # which ``mmap`` has no name for
DIM = 64


def guarded(given: Tensor) -> Tensor:
    """The same numbers in memory with nothing behind it."""
    page = mmap.PAGESIZE
    size = -(-given.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    end = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + size
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(end), ctypes.c_size_t(page), _PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect")
    found = torch.frombuffer(memory, dtype=given.dtype, count=given.numel(), offset=size - given.nbytes)
    return found.view(given.shape).copy_(given)


def guarded_cache(cache: Pages8bit) -> Pages8bit:
    found = replace(
        cache,
        values=guarded(cache.values),
        scales=None if cache.scales is None else guarded(cache.scales),
        fixed=None if cache.fixed is None else LayerScales(guarded(cache.fixed.scales)),
    )
    if found.kept.by_head is not None:
        vars(found)["kept"] = replace(found.kept, by_head=guarded(found.kept.by_head))
    return found


def attend(heads: int, kv_heads: int, tokens: int, threads: int, dtype: torch.dtype, fixed: bool) -> None:
    platform = CpuDevice(threads=threads)
    platform.select_dtype("bfloat16", None)
    assert platform.native.current is not None
    platform.cache.dtype = dtype
    scales = [LayerScales(torch.full((2, kv_heads, DIM), 0.05))] if fixed else None
    (cache,) = platform.cache.make(1, 2, 16, kv_heads, DIM, torch.bfloat16, scales)
    assert (cache.kept.by_head is not None) == fixed
    platform.cache.write(cache, torch.arange(32), torch.randn(32, 2 * kv_heads, DIM).bfloat16())
    starts, counts, pages = np.array([16 - tokens]), np.array([tokens]), np.array([[1]], np.int32)
    rows = AttentionRows(starts, counts, pages, decodes=int(tokens == 1), verifies=int(tokens > 1))
    queries, plan = torch.randn(tokens, heads, DIM).bfloat16(), platform.attention.plan(rows, 0)
    expected = platform.attention.attend(queries, cache, plan, 0.2)
    assert torch.equal(platform.attention.attend(queries, guarded_cache(cache), plan, 0.2), expected)


if __name__ == "__main__":
    torch.manual_seed(0)
    for case in CASES:
        print(*case, flush=True)
        attend(*case)
