"""Ranks: processes that divide a benchmark's model, a GPU each.

Every rank runs the whole benchmark, with the same steps in the same order: the collectives keep them together. Rank 0
is the process that was called; only it prints and records.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["Ranks", "started_ranks"]

_VARIABLE = "TROUPE_BENCH_RANK"
"""Environment variable of a rank that rank 0 started: its number and the folder where the ranks meet."""


class Ranks(msgspec.Struct, frozen=True):
    """One rank of ``size``. ``folder``: where all of them meet."""

    size: int
    rank: int
    folder: Path

    def config(self, model: str) -> dict[str, Any]:
        """Fields of RunnerConfig for this rank of ``model``."""
        if self.size == 1:
            return {}
        meeting = str(self.folder / model)
        return {"tp_rank": self.rank, "tp_size": self.size, "device_index": self.rank, "rendezvous": meeting}


@contextmanager
def started_ranks(size: int, arguments: Sequence[str]) -> Iterator[Ranks]:
    """The ranks of this benchmark; rank 0 starts the others with its own ``arguments``, and ends them."""
    rank, _, place = os.environ.get(_VARIABLE, "").partition(":")
    if rank:
        yield Ranks(size, int(rank), Path(place))
        return
    with tempfile.TemporaryDirectory() as folder:
        others: list[subprocess.Popen[bytes]] = []
        words = [word for word in arguments if word != "--record"]
        try:
            for other in range(1, size):
                command = [sys.executable, "-m", "tests.bench", "device", *words]
                environment = os.environ | {_VARIABLE: f"{other}:{folder}"}
                others.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
            yield Ranks(size, 0, Path(folder))
        finally:
            for process in others:
                process.terminate()
                process.wait()
