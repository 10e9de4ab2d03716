"""The time of a GPU by kernel, from torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["profiled"]


def profiled(work: Callable[[], Any], most: int = 28) -> tuple[str, list[str]]:
    """Do ``work`` under the profiler: how long the device was busy, and a line for each of the ``most`` kernels and
    copies that took longest: milliseconds in all, calls, microseconds a call, name.
    """
    import torch
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    times: dict[str, tuple[float, int]] = {}
    spans = []
    for event in found.events():
        total, calls = times.get(event.name, (0.0, 0))
        times[event.name] = (total + event.device_time_total, calls + 1)
        spans.append((event.time_range.start, event.time_range.end))
    busy, reached = 0.0, 0.0
    for begin, end in sorted(spans):
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    slowest = sorted(times.items(), key=lambda item: -item[1][0])[:most]
    return (
        f"device busy {busy / 1e3:.1f} ms, {len(spans)} kernels and copies",
        [f"{total / 1e3:10.3f} ms {calls:7d} {total / calls:9.2f} us  {name[:90]}" for name, (total, calls) in slowest],
    )
