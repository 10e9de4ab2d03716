"""TimelineWriter: writes the scheduler's part of the timelines of requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from actors.boards.journal import Journal, JournalEntry
from actors.protocol import PrefixMatch
from actors.scheduling.planner import StepPlan
from actors.scheduling.sequence_table import Move
from kernels.contract.step import StepResult
from telemetry.timeline import Hop
from telemetry.traces.worker_spans import STEP_ROW, TracedRow, WorkerSpan

if TYPE_CHECKING:
    from telemetry.traces.tracing import Tracing

__all__ = ["TimelineWriter"]


class _Prefill(msgspec.Struct, frozen=True):
    """A chunk on the device."""

    entry: JournalEntry
    hop: Hop
    samples: bool


class TimelineWriter:
    """Writes events of admission, preemption, end and prefill, never of a decode. Sequences that have left the journal
    are skipped. ``worker``: the name of the worker whose results are used."""

    def __init__(self, journal: Journal, worker: str, tracing: Tracing | None = None) -> None:
        self._journal = journal
        self._worker = worker
        self._tracing = tracing
        self._prefixes: dict[
            int, tuple[float, float, PrefixMatch]
        ] = {}  # of this planning: (sent_at, replied_at, prefix)
        self._prefills: dict[int, list[_Prefill]] = {}  # by the number of the step

    def resumed(self, entries: Iterable[JournalEntry], now: float) -> None:
        """Record that a new scheduler has queued these."""
        for entry in entries:
            entry.end_decode(now, len(entry.output))
            self._queue_again(entry, now)

    def prefix_matched(self, sequence: int, sent_at: float, replied_at: float, prefix: PrefixMatch) -> None:
        """Record that the cache has opened a sequence; :meth:`moved` reports whether it starts."""
        self._prefixes[sequence] = (sent_at, replied_at, prefix)

    def moved(self, moves: Iterable[Move], now: float) -> None:
        """Record moves of sequences onto or off the device."""
        for move in moves:
            entry = self._journal.get(move.sequence)
            if entry is None:
                continue
            if move.kind == "started":
                self._started(entry, now, move.output)
                continue
            entry.end_decode(now, move.output)
            if move.kind == "ended":
                continue
            if move.kind == "preempted":
                entry.preemptions += 1
                entry.timeline.mark("preempted", now, entry.index, output_tokens=move.output)
            self._queue_again(entry, now)
        self._prefixes.clear()

    def _started(self, entry: JournalEntry, now: float, output: int) -> None:
        timeline, index = entry.timeline, entry.index
        sent_at, replied_at, prefix = self._prefixes.get(entry.sequence, (now, now, None))
        entry.decoded_from = output
        queued = timeline.open_hop("queue", index)
        if queued is not None:
            timeline.finish(queued, sent_at)
            if queued.attributes.get("resumed"):
                timeline.mark("resumed", now, index)
        if prefix is not None:
            hop = timeline.begin("cache", sent_at, index)
            timeline.finish(hop, replied_at, cached_tokens=prefix.cached, pages=len(prefix.pages) // 4)

    def _queue_again(self, entry: JournalEntry, now: float) -> None:
        timeline, index = entry.timeline, entry.index
        if timeline.open_hop("queue", index) is None:
            timeline.finish_all(index, now, "cache", "prefill", "decode")
            timeline.begin("queue", now, index, resumed=True)

    # -- steps

    def steps_lost(self, now: float, reason: str = "the worker was replaced") -> None:
        """Close the prefills of all steps in flight, which have no result."""
        for prefills in self._prefills.values():
            for prefill in prefills:
                prefill.entry.timeline.finish(prefill.hop, now)
        self._prefills.clear()
        if self._tracing is not None:
            self._tracing.steps_lost(now, reason)

    def sent(self, step: int, plan: StepPlan, now: float) -> tuple[TracedRow, ...]:
        """Record that a step is about to be sent; returns its traced rows."""
        prefills: list[_Prefill] = []
        traces: list[TracedRow] = []
        for chunk in plan.chunks:
            entry = self._journal.get(chunk.sequence)
            if entry is None:
                continue
            timeline = entry.timeline
            hop = timeline.begin("prefill", now, entry.index, step=step, tokens=chunk.tokens, position=chunk.position)
            prefills.append(_Prefill(entry, hop, chunk.samples))
            if self._tracing is not None and (carrier := self._tracing.carrier(timeline, hop)) is not None:
                traces.append(TracedRow(chunk.row, carrier))
        if prefills:
            self._prefills[step] = prefills
        if self._tracing is not None and self._tracing.level > 1:
            carrier = self._trace_step(self._tracing, step, plan, prefills, now)
            if carrier is not None:
                traces.append(TracedRow(STEP_ROW, carrier))
        return tuple(traces)

    def _trace_step(
        self, tracing: Tracing, step: int, plan: StepPlan, prefills: list[_Prefill], now: float
    ) -> str | None:
        decodes = [entry for sequence in plan.decodes if (entry := self._journal.get(sequence.id)) is not None]
        timelines = {id(entry.timeline): entry.timeline for entry in decodes + [each.entry for each in prefills]}
        tokens = len(plan.decodes) + sum([chunk.tokens for chunk in plan.chunks])
        shape = {"decodes": len(plan.decodes), "prefills": len(plan.chunks), "tokens": tokens}
        return tracing.step_began(step, timelines.values(), now, shape)

    def answered(self, result: StepResult, now: float) -> None:
        """Record the result of a step."""
        if self._tracing is not None:
            self._tracing.worker_spans(self._worker, result.spans)
            self._tracing.step_ended(result.number, now, device_seconds=result.timing.run)
        for prefill in self._prefills.pop(result.number, ()):
            entry, hop = prefill.entry, prefill.hop
            entry.timeline.finish(hop, now, device_seconds=result.timing.run, worker=self._worker)
            if prefill.samples and entry.sequence in self._journal and hop.end == now:
                entry.begin_decode(now)

    def peer_answered(self, worker: str, spans: tuple[WorkerSpan, ...]) -> None:
        """Record the spans of another rank's part of a step."""
        if self._tracing is not None:
            self._tracing.worker_spans(worker, spans)

    def worker_died(
        self, sequences: Iterable[int], suspects: Iterable[int], at: float, now: float, reason: str
    ) -> None:
        """Record that a worker with ``sequences`` died or hangs, ``suspects`` of them in a step. ``at``: when that was
        first known."""
        self.steps_lost(now, reason)
        suspected = frozenset(suspects)
        for sequence in sequences:
            entry = self._journal.get(sequence)
            if entry is not None:
                # The report comes late. A sequence that arrived since waits from its arrival. Results under way still
                # counted: a stream that one of them started pauses from its start.
                paused = max(at, entry.timeline.started if entry.decoding is None else entry.decoding.start)
                entry.timeline.mark("worker_died", paused, entry.index, reason=reason, in_step=sequence in suspected)
                entry.end_decode(now, len(entry.output))
                self._queue_again(entry, now)

    def quarantined(self, sequences: Iterable[int], now: float) -> None:
        """Record that these sequences are not run again."""
        for sequence in sequences:
            entry = self._journal.get(sequence)
            if entry is not None:
                entry.timeline.mark("quarantined", now, entry.index, worker_deaths=entry.worker_deaths)
