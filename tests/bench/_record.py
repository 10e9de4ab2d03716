"""The rows that benchmarks record, and the files that keep them: ``tests/bench/results/NAME.jsonl``."""

from __future__ import annotations

import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

__all__ = ["RESULTS", "Machine", "Row", "newest", "read", "record", "this_machine", "write"]

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results")


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where a row was measured. ``isa`` is the instruction set in use, ``gpu`` the accelerator's name."""

    processor: str = ""
    isa: str = ""
    cores: int = 0
    gpu: str = ""

    def __str__(self) -> str:
        processor = " ".join(part for part in (self.processor, f"({self.isa})" if self.isa else "") if part)
        return self.gpu or (f"{processor}, {self.cores} cores" if self.cores else processor)


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One metric of one point. ``spread`` is the smallest and the largest of its rounds, ``commit`` "" if unknown."""

    date: str
    machine: Machine
    command: str
    point: str
    metric: str
    median: float
    unit: str = ""
    spread: tuple[float, float] | None = None
    commit: str = ""


_recorded: list[tuple[str, str, list[float], str]] = []


def record(point: str, metric: str, values: float | Sequence[float], unit: str = "") -> None:
    """Keep a measurement of this process until `write`. ``values`` are those of all rounds, or one."""
    numbers = [float(value) for value in values] if isinstance(values, Sequence) else [float(values)]
    _recorded.append((point, metric, numbers, unit))


def this_machine() -> Machine:
    """The machine of this process. The GPU counts where torch was imported and finds one."""
    from kernels.contract.cpu_isa import chosen_isa
    from tests.bench.serving import cpu_name

    torch = sys.modules.get("torch")
    gpu = torch.cuda.get_device_name(0) if torch is not None and torch.cuda.is_available() else ""
    return Machine(cpu_name(), chosen_isa().name.lower(), len(os.sched_getaffinity(0)), gpu)


def _commit() -> str:
    """The short name of the checked out commit, with a + where files differ from it; "" outside of a repository."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    name = git("rev-parse", "--short", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!tests/bench/results")
    return f"{name}+" if name and changed else name


def write(benchmark: str, words: Sequence[str], folder: Path = RESULTS) -> int:
    """Append what was recorded to the benchmark's file; the number of rows. ``words`` are the command's arguments."""
    machine, commit, date = this_machine(), _commit(), time.strftime("%Y-%m-%d")
    command = shlex.join([benchmark, *(word for word in words if word != "--record")])
    rows = [
        Row(
            date=date,
            machine=machine,
            command=command,
            point=point,
            metric=metric,
            median=round(statistics.median(values), 6),
            unit=unit,
            spread=(round(min(values), 6), round(max(values), 6)) if len(values) > 1 else None,
            commit=commit,
        )
        for point, metric, values, unit in _recorded
    ]
    _recorded.clear()
    folder.mkdir(exist_ok=True)
    with (folder / f"{benchmark}.jsonl").open("ab") as file:
        file.writelines(msgspec.json.encode(row) + b"\n" for row in rows)
    return len(rows)


def read(benchmark: str, folder: Path = RESULTS) -> list[Row]:
    """The rows of a benchmark, oldest first. Raises ValueError with file and line for a row that is none."""
    path = folder / f"{benchmark}.jsonl"
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else (), 1):
        try:
            rows.append(msgspec.json.decode(line, type=Row))
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path.name}:{number}: {error}") from error
    return sorted(rows, key=lambda row: row.date)  # stable: rows of one day stay in their order


def newest(rows: Sequence[Row]) -> dict[tuple[str, str], Row]:
    """The last row of each point and metric."""
    return {(row.point, row.metric): row for row in rows}
