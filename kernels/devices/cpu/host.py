"""What this process may use of its host: processors and memory, cgroup limits included."""

from __future__ import annotations

import os
from pathlib import Path

from kernels.devices.memory import MemoryUsage

__all__ = ["host_memory", "usable_cores"]

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Physical cores this process may run on: affinity, hyper-threads counted once, cgroup quota; at least 1."""
    try:
        cpus = os.sched_getaffinity(0)
    except AttributeError:  # not Linux
        return max(1, os.cpu_count() or 1)
    cores = {_siblings(cpu) for cpu in cpus}
    quota = _cpu_quota()
    return max(1, len(cores) if quota is None else min(len(cores), int(quota)))


def host_memory() -> MemoryUsage:
    """Memory of the host, or of the cgroup where that is less."""
    info = {}
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            key, _, value = line.partition(":")
            info[key] = int(value.split()[0]) * 1024
        total, free = info["MemTotal"], info["MemAvailable"]
    except (OSError, KeyError, ValueError, IndexError):
        total = free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = _number(_CGROUP / limit_name), _number(_CGROUP / used_name)
        if limit is not None and used is not None and limit < total:
            total, free = limit, min(free, max(0, limit - used))
    return MemoryUsage(total=total, free=free)


def _siblings(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _cpu_quota() -> float | None:
    """Processors' worth of time a cgroup grants (version 2, then 1), or None without a limit."""
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()[:2]
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    quota_us, period_us = _number(_CGROUP / "cpu/cpu.cfs_quota_us"), _number(_CGROUP / "cpu/cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
