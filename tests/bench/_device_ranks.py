"""Ranks: processes that divide a benchmark's model, a GPU each.

Every rank runs the whole benchmark, with the same steps in the same order: the collectives keep them together. Rank 0
is the process that was called; only it prints and records.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["Ranks", "started_ranks"]

_VARIABLE = "TROUPE_BENCH_RANK"
"""Environment variable of a rank that rank 0 started: its number and the folder where the ranks meet."""


class Ranks(msgspec.Struct, frozen=True):
    """One rank of ``size``, which are ``stages`` of a pipeline; those of a stage divide its layers. ``folder``: where
    all of them meet. Rank 0 has results, so it is of the last stage. ``parts``: of the ranks of a stage that
    experts are divided over; those of attention have requests each if it is ``apart``."""

    size: int
    rank: int
    folder: Path
    stages: int = 1
    parts: int = 1
    apart: bool = False

    @property
    def attentions(self) -> int:
        """Parts of data-parallel attention, each of which runs as many requests."""
        return self.size // self.stages if self.apart else 1

    @property
    def suffix(self) -> str:
        """Of a model's name in rows."""
        width = self.size // self.stages
        experts = f" ep {self.parts}" if self.parts > 1 else ""
        tensor = f" dp {width} attention" if self.apart else f" tp {width}"
        parts = (tensor if width > 1 else "", f" pp {self.stages}" if self.stages > 1 else "", experts)
        return "".join(parts)

    def config(self, model: str) -> dict[str, Any]:
        """Fields of RunnerConfig for this rank of ``model``."""
        if self.size == 1:
            return {}
        meeting = str(self.folder / model)
        width = self.size // self.stages
        tensor = {"tp_rank": self.rank % width, "tp_size": width, "ep_size": self.parts, "dp_size": self.attentions}
        stage = {"pp_rank": self.stages - 1 - self.rank // width, "pp_size": self.stages}
        return {**tensor, **stage, "rendezvous": meeting}


def _gpu(rank: int) -> str:
    """The only GPU that a rank sees, as a server's worker does: what runs before its model stays on it, too."""
    visible = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    return visible[rank] if rank < len(visible) else str(rank)


@contextmanager
def started_ranks(
    ranks: int, stages: int, parts: int, arguments: Sequence[str], apart: bool = False
) -> Iterator[Ranks]:
    """The ``ranks`` of each stage; rank 0 starts the others with its own ``arguments``, and ends them.

    If another rank dies, rank 0 exits at once: it would wait for it in a collective."""
    size = ranks * stages
    rank, _, place = os.environ.get(_VARIABLE, "").partition(":")
    if rank:
        yield Ranks(size, int(rank), Path(place), stages, parts, apart)
        return
    with tempfile.TemporaryDirectory() as folder:
        others: list[subprocess.Popen[bytes]] = []
        words = [word for word in arguments if word != "--record"]
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.2):
                for number, process in enumerate(others, start=1):
                    if process.poll():
                        print(f"rank {number} of {size} exited with code {process.returncode}", file=sys.stderr)
                        for other in others:
                            other.kill()
                        shutil.rmtree(folder, ignore_errors=True)
                        sys.stderr.flush()
                        os._exit(1)  # the main thread heeds nothing

        try:
            for other in range(1, size):
                command = [sys.executable, "-m", "tests.bench", "device", *words]
                environment = os.environ | {_VARIABLE: f"{other}:{folder}", "CUDA_VISIBLE_DEVICES": _gpu(other)}
                others.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
            threading.Thread(target=watch, daemon=True).start()
            yield Ranks(size, 0, Path(folder), stages, parts, apart)
        finally:
            over.set()
            for process in others:
                process.kill()  # one in a collective heeds nothing else
                process.wait()
