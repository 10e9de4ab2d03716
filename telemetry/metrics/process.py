"""Memory, file descriptors, threads and processor time of the engine's processes, read from /proc at a scrape."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping

from prometheus_client import ProcessCollector

from telemetry.metrics.exposition import Samples

__all__ = ["ProcessMetrics"]

_NAMES = {
    "process_resident_memory_bytes": "troupe_process_resident_memory_bytes",
    "process_open_fds": "troupe_process_open_fds",
    "process_cpu_seconds": "troupe_process_cpu_seconds_total",
}


class ProcessMetrics:
    """``pids`` returns the processes by name. Without /proc there are no samples."""

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        self._pids = pids
        self._collectors: dict[int, ProcessCollector] = {}

    def readings(self) -> Mapping[str, Samples]:
        pids = dict(self._pids())
        self._collectors = {pid: self._collectors.get(pid) or _collector(pid) for pid in pids.values()}
        result: dict[str, dict[tuple[str, ...], float]] = {}
        for process, pid in pids.items():
            for family in self._collectors[pid].collect():
                name = _NAMES.get(family.name)
                if name is not None:
                    result.setdefault(name, {})[process,] = family.samples[0].value
            with contextlib.suppress(OSError):
                result.setdefault("troupe_process_threads", {})[process,] = len(os.listdir(f"/proc/{pid}/task"))
        return result


def _collector(pid: int) -> ProcessCollector:
    return ProcessCollector(pid=lambda: pid, registry=None)
