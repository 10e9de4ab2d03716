"""GPU time by kernel, from torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["profiled"]

_PROMPTS = "prefill_attention_kernel"  # a kernel that only steps with prompts have
_LAST = "step_end_kernel"  # the last kernel of a step
_COPIES = ("Mem", "mem")  # between host and device, and on it: no work of a step


def profiled(work: Callable[[], Any], most: int = 28) -> tuple[str, list[str]]:
    """Run ``work`` under the profiler: how long the device was busy, for how much of the decodes after the last prompt
    no kernel ran, and a line for each of the ``most`` kernels and copies that took longest: milliseconds in all, calls,
    microseconds a call, name.
    """
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    times: dict[str, tuple[float, int]] = {}
    spans: list[tuple[float, float, str]] = []
    for event in found.events():
        if event.device_type != DeviceType.CUDA:  # calls of the runtime, in the host's time
            continue
        total, calls = times.get(event.name, (0.0, 0))
        times[event.name] = (total + event.device_time_total, calls + 1)
        spans.append((event.time_range.start, event.time_range.end, event.name))
    busy, reached = 0.0, 0.0
    for begin, end, _ in sorted(spans):
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    slowest = sorted(times.items(), key=lambda item: -item[1][0])[:most]
    return (
        f"device busy {busy / 1e3:.1f} ms, {len(spans)} kernels and copies{_idle(sorted(spans))}",
        [f"{total / 1e3:10.3f} ms {calls:7d} {total / calls:9.2f} us  {name[:90]}" for name, (total, calls) in slowest],
    )


def _idle(spans: Sequence[tuple[float, float, str]]) -> str:
    """The share of decode steps in which no kernel ran: in all, and between the last kernel of one and the first of the
    next."""
    kernels = [span for span in spans if not span[2].startswith(_COPIES)]
    prompts = max((end for _, end, name in kernels if name.startswith(_PROMPTS)), default=0.0)
    ends = [end for _, end, name in kernels if name.startswith(_LAST) and end > prompts]
    if len(ends) < 2:
        return ""
    between, idle, reached, after = 0.0, 0.0, ends[0], True
    for begin, end, name in kernels:
        if ends[0] <= begin < ends[-1]:
            idle += (gap := max(0.0, begin - reached))
            between += gap if after else 0.0
            reached, after = max(reached, end), name.startswith(_LAST)
    took = (ends[-1] - ends[0]) / 100
    return f"; {len(ends) - 1} decodes: idle {idle / took:.1f} % of the time, {between / took:.2f} % between them"
