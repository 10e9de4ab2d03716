"""Measure how fast a GPU reads its memory. Chips of one kind differ by some percent, and so do decodes of one row."""

from __future__ import annotations

import statistics

import torch
import triton
import triton.language as tl

__all__ = ["read_rate"]

BYTES = 4 << 30
"""Many times what caches hold."""
_BLOCK = 8192


@triton.jit
def _read(values, out, count, block: tl.constexpr):
    """Sum every n-th block, so that all are read."""
    at = tl.arange(0, block)
    total = tl.zeros([block], tl.int32)
    for index in tl.range(tl.program_id(0), count, tl.num_programs(0), num_stages=4):
        total += tl.load(values + index.to(tl.int64) * block + at, eviction_policy="evict_first")
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def read_rate(repeats: int = 20) -> float:
    """Bytes a second, the median of several reads of a large tensor."""
    values = torch.ones(BYTES // 4, dtype=torch.int32, device="cuda")
    programs = 8 * torch.cuda.get_device_properties(values.device).multi_processor_count
    out = torch.zeros(programs, dtype=torch.int32, device=values.device)
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        _read[(programs,)](values, out, len(values) // _BLOCK, _BLOCK, num_warps=8)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    assert int(out.sum()) == len(values)
    del values
    torch.cuda.empty_cache()
    return BYTES / statistics.median(times[2:])
