"""One server process for one engine: refuse a Hypercorn with several workers."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["refuse_sibling_workers", "requested_workers"]


def requested_workers(argv: Sequence[str]) -> int | None:
    """The number after ``-w`` or ``--workers`` of a command line, or None."""
    for position, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name in ("-w", "--workers"):
            value = value if equals else next(iter(argv[position + 1 : position + 2]), "")
        elif word.startswith("-w") and word[2:].isdecimal():
            value = word[2:]
        else:
            continue
        return int(value) if value.isdecimal() else None
    return None


def refuse_sibling_workers() -> None:
    """Raise RuntimeError in a worker process of Hypercorn that has siblings.

    Each would load the model and its own cache. The number of workers is read from the command line; if it comes from a
    configuration file, siblings are found among the parent's children (on Linux).
    """
    parent = multiprocessing.parent_process()
    if parent is None or "hypercorn" not in sys.argv[0] or parent.pid is None:
        return
    workers = requested_workers(sys.argv[1:])
    if (workers is not None and workers > 1) or any(pid != os.getpid() for pid in _workers_of(parent.pid)):
        raise RuntimeError(
            "Troupe runs in one server process: each worker would load the model again. Start Hypercorn with one "
            "worker (the default); the engine batches requests by itself."
        )


def _workers_of(parent: int) -> Iterator[int]:
    """Process ids of children that multiprocessing spawned; none where /proc is missing."""
    for listing in Path(f"/proc/{parent}/task").glob("*/children"):
        try:
            pids = listing.read_text().split()
        except OSError:
            continue
        for pid in pids:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if b"spawn_main" in command:
                yield int(pid)
