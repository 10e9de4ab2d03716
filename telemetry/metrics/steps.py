"""Work of the device, counted once a step, and never for each row or token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from telemetry.metrics.exposition import Samples
from telemetry.metrics.histogram import Histogram
from telemetry.metrics.speculation import SpeculationMetrics

if TYPE_CHECKING:
    from telemetry.logs.step_log import StepLog

__all__ = ["StepMetrics", "StepShape"]

_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 96.0, 128.0, 192.0, 256.0, 384.0, 512.0, 1024.0)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 40.96)


class StepShape:
    """The work of a step. ``decodes``: rows of one token each; ``prefill_tokens``: tokens of the other rows."""

    __slots__ = ("decodes", "prefill_tokens", "prefills", "replica", "sent")

    def __init__(self, sent: float, decodes: int = 0, prefills: int = 0, prefill_tokens: int = 0) -> None:
        self.sent = sent
        self.decodes = decodes
        self.prefills = prefills
        self.prefill_tokens = prefill_tokens
        self.replica = 0  # whose steps follow each other


class StepMetrics:
    """Counts since the start of the engine. Times are the system clock's seconds.

    A decoding sequence has a row in every step, so the time between two of its tokens is the time between two results:
    one observation for each decode row, added at once.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.generated_tokens = 0
        self.graph_rows = 0
        self.eager_rows = 0
        self.divided_rows = 0
        self.queued_seconds = 0.0
        self.prepare_seconds = 0.0
        self.run_seconds = 0.0
        self.speculation = SpeculationMetrics()
        self.rows = Histogram(_ROWS)
        self.seconds = Histogram(_SECONDS)
        self.inter_token: list[Histogram] = []  # each with its own buckets
        self.log: StepLog | None = None
        self.tokens: list[Histogram] = []  # of a step; the same
        self.warming_up = False  # only warm-up steps run, whose times belong to no client
        self._in_flight: dict[int, float] = {}  # seconds with a step in flight, by replica
        self._stages: dict[tuple[int, str], float] = {}  # those in which a worker of a pipeline computed
        self._answered: dict[int, float] = {}  # when the last step was, by replica

    def answered(
        self,
        shape: StepShape,
        now: float,
        *,
        generated: int,
        graph_rows: int,
        queued: float,
        prepare: float,
        run: float,
        divided: bool = False,
    ) -> None:
        """Count a step's result. ``generated``: tokens given to sequences; ``graph_rows``: rows that ran in a captured
        graph; ``divided``: whether it ran as two batches; the other parameters are the worker's seconds."""
        rows = shape.decodes + shape.prefills
        self.steps += 1
        self.prefill_tokens += shape.prefill_tokens
        self.decode_tokens += shape.decodes
        self.generated_tokens += generated
        self.graph_rows += graph_rows
        if divided:
            self.divided_rows += rows
        else:
            self.eager_rows += rows - graph_rows
        self.queued_seconds += queued
        self.prepare_seconds += prepare
        self.run_seconds += run
        self.rows.add(rows)
        if self.warming_up:
            self._answered.pop(shape.replica, None)
            return
        self.seconds.add(now - shape.sent)
        for histogram in self.tokens:
            histogram.add(shape.decodes + shape.prefill_tokens)
        before = self._answered.get(shape.replica)
        if shape.decodes and before is not None:
            for histogram in self.inter_token:
                histogram.add(now - before, shape.decodes)
        self._answered[shape.replica] = now
        if self.log is not None:
            self.log.answered(shape, now, generated=generated, graph_rows=graph_rows)

    def had_steps(self, replica: int, seconds: float) -> None:
        """Count seconds in which a replica had a step in flight."""
        self._in_flight[replica] = self._in_flight.get(replica, 0.0) + seconds

    def stage_ran(self, replica: int, worker: str, seconds: float) -> None:
        """Count seconds in which a worker of a pipeline's stage computed."""
        key = replica, worker
        self._stages[key] = self._stages.get(key, 0.0) + seconds

    def _pipeline(self) -> Mapping[str, Samples]:
        if not self._stages:
            return {}
        replicas = {replica for replica, _ in self._stages}
        return {
            "troupe_pipeline_seconds_total": {(str(each),): self._in_flight.get(each, 0.0) for each in replicas},
            "troupe_pipeline_stage_seconds_total": {
                (str(replica), worker): seconds for (replica, worker), seconds in tuple(self._stages.items())
            },
        }

    def interrupted(self, replica: int = 0) -> None:
        """Forget lost steps: the next tokens come after a gap that is no inter-token latency."""
        self._answered.pop(replica, None)

    def readings(self) -> Mapping[str, Samples]:
        return {
            **self.speculation.readings(),
            **self._pipeline(),
            "troupe_steps_total": self.steps,
            "troupe_step_seconds": self.seconds,
            "troupe_step_rows": self.rows,
            "troupe_step_tokens_total": {("prefill",): self.prefill_tokens, ("decode",): self.decode_tokens},
            "troupe_step_rows_total": {
                ("graph",): self.graph_rows,
                ("eager",): self.eager_rows,
                **({("two_batches",): self.divided_rows} if self.divided_rows else {}),
            },
            "troupe_step_phase_seconds_total": {
                ("queued",): self.queued_seconds,
                ("prepare",): self.prepare_seconds,
                ("run",): self.run_seconds,
            },
            "troupe_generated_tokens_total": self.generated_tokens,
        }
