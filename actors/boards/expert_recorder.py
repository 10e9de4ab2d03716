"""Records which experts the tokens of steps take, between a start and a stop.

The scheduler asks for the experts of a step when it sends it, and adds what the result has. The engine reads.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from kernels.contract.step import RecordedExperts, StepResult

__all__ = ["ExpertRecord", "ExpertRecorder", "RecordedStep", "RecorderMode", "balancedness", "write_record"]

RecorderMode = Literal["stat", "stat_approx", "per_pass", "per_token"]

_BUFFER_STEPS = 1000
_MAX_BYTES = 256 << 20
"""Bytes of single steps that a record holds."""
_APPROXIMATE_STEPS = 8
"""Of stat_approx: one step of so many is counted."""


class RecordedStep(msgspec.Struct, frozen=True):
    """A step: ``counts`` int32 [layers, experts], the tokens that each expert took. ``requests``: of its rows.

    With ``experts`` int16 [tokens, layers, chosen]: those of all tokens, as ``tokens`` int32 [rows] says in the order
    of the rows.
    """

    number: int
    replica: int
    requests: Sequence[str]
    counts: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32] | None = None
    experts: npt.NDArray[np.int16] | None = None

    @property
    def nbytes(self) -> int:
        return self.counts.nbytes + (0 if self.experts is None else self.experts.nbytes)


class ExpertRecord:
    """What was recorded since a start or a dump.

    ``counts`` int64 [layers, experts]: the sum over the steps that are held. ``size``: the steps that are held at most;
    -1: all.
    """

    def __init__(self, mode: RecorderMode, size: int) -> None:
        self.mode = mode
        self.counts: npt.NDArray[np.int64] | None = None
        self.passes = 0  # whose counts are in the sum
        self.steps: deque[RecordedStep] = deque()  # empty if only sums are asked for
        self.successor: ExpertRecord | None = None  # that gets the results of steps in flight
        self._size, self._bytes = size, 0
        self._keeps = size > 0 or mode in ("per_pass", "per_token")

    @property
    def wanted(self) -> RecordedExperts:
        return "tokens" if self.mode == "per_token" else "counts"

    def wants(self, number: int) -> bool:
        """Whether the step of this number is recorded."""
        return self.mode != "stat_approx" or number % _APPROXIMATE_STEPS == 0

    def add(self, replica: int, requests: Sequence[str], result: StepResult, shape: tuple[int, int]) -> None:
        """Add a step's result, if it has counts. ``shape``: the model's layers, and the experts that a token takes."""
        if self.successor is not None:
            self.successor.add(replica, requests, result, shape)
            return
        found = result.record
        if found is None:
            return
        layers, chosen = shape
        counts = np.frombuffer(found.counts, np.int32).reshape(layers, -1)
        if self.counts is None:
            self.counts = np.zeros(counts.shape, np.int64)
        self.counts += counts
        self.passes += 1
        if not self._keeps:
            return
        tokens = experts = None
        if found.routes is not None:
            tokens = np.frombuffer(found.routes.counts, np.int32)
            experts = np.frombuffer(found.routes.values, np.int16).reshape(-1, layers, chosen)
            requests = [requests[row] for row in np.frombuffer(found.routes.rows, np.int32).tolist()]
        self._hold(RecordedStep(result.number, replica, requests, counts, tokens, experts))

    def extend(self, later: ExpertRecord) -> None:
        """Add a later record."""
        if later.counts is not None:
            self.counts = later.counts if self.counts is None else self.counts + later.counts
        self.passes += later.passes
        for step in later.steps:
            self._hold(step)

    def _hold(self, step: RecordedStep) -> None:
        """Hold a step, whose counts are in the sum, and drop the oldest ones that are too many."""
        self.steps.append(step)
        self._bytes += step.nbytes
        while len(self.steps) > 1 and (0 < self._size < len(self.steps) or self._bytes > _MAX_BYTES):
            oldest = self.steps.popleft()
            self._bytes -= oldest.nbytes
            assert self.counts is not None
            self.counts -= oldest.counts
            self.passes -= 1


class ExpertRecorder:
    """The recorder of all replicas of an engine. ``mode``: None: it cannot be started. ``size``: see ExpertRecord."""

    def __init__(self, mode: RecorderMode | None, size: int | None) -> None:
        self.mode = mode
        self._size = _BUFFER_STEPS if size is None else size
        self.is_recording = False
        self.record: ExpertRecord | None = None

    def _fresh(self) -> ExpertRecord:
        assert self.mode is not None
        return ExpertRecord(self.mode, self._size)

    def start(self) -> None:
        """Begin a new record."""
        self.record, self.is_recording = self._fresh(), True

    def stop(self) -> None:
        """Record no more steps; the record remains. Steps in flight still belong to it."""
        self.is_recording = False

    def take(self) -> ExpertRecord:
        """The record so far, which does not change any more. A new one begins, which goes on if steps are recorded,
        and gets the results of steps in flight."""
        taken, self.record = self.record or self._fresh(), self._fresh()
        taken.successor = self.record
        return taken

    def restore(self, taken: ExpertRecord) -> None:
        """Go on with a record that was taken and not written. What was recorded meanwhile is added to it."""
        later, taken.successor = taken.successor, None
        if later is not None and self.record is later:
            taken.extend(later)
            self.record, later.successor = taken, taken

    def for_step(self, number: int) -> ExpertRecord | None:
        """The record that the step of this number belongs to; None: its experts are not asked for."""
        record = self.record if self.is_recording else None
        return record if record is not None and record.wants(number) else None


def balancedness(counts: npt.NDArray[np.int64]) -> dict[int, float]:
    """Of each layer with tokens in ``counts`` [layers, experts] the mean of its experts' tokens, divided by their
    maximum: 1 when all take as many."""
    return {layer: float(row.mean() / row.max()) for layer, row in enumerate(counts) if row.max() > 0}


def write_record(record: ExpertRecord, folder: str | None, about: dict[str, Any]) -> Path:
    """Write a record and ``about`` as a new JSON file, readable by this user alone. Returns its path. Raises OSError.

    ``folder``: created if it is missing; None: the one for temporary files.
    """
    counts = [] if record.counts is None else record.counts.tolist()
    whole: dict[str, Any] = {**about, "mode": record.mode, "passes": record.passes, "logical_count": counts}
    directory = Path(folder or tempfile.gettempdir())
    directory.mkdir(parents=True, exist_ok=True)
    prefix = f"expert_distribution_recorder_{time.time():.3f}_"
    handle, path = tempfile.mkstemp(".json", prefix, directory)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.encode(whole)[:-1])
            if record.mode in ("per_pass", "per_token"):  # one by one: as lists they take many times their bytes
                for number, step in enumerate(record.steps):
                    file.write(b"," if number else b',"records":[')
                    file.write(msgspec.json.encode(_step(step)))
                file.write(b"]" if record.steps else b',"records":[]')
            file.write(b"}")
    except OSError:
        Path(path).unlink(missing_ok=True)
        raise
    return Path(path).resolve()


def _step(step: RecordedStep) -> dict[str, Any]:
    result: dict[str, Any] = {"step": step.number, "replica": step.replica, "requests": list(step.requests)}
    if step.tokens is None or step.experts is None:
        return {**result, "logical_count": step.counts.tolist()}
    return {**result, "tokens": step.tokens.tolist(), "experts": step.experts.tolist()}
