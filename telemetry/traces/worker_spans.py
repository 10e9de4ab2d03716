"""Spans of a worker process: recorded there as plain data, exported by the engine.

A worker has no exporter and no OpenTelemetry. A step names the traced rows, and its result returns the spans.
"""

from __future__ import annotations

import os
import secrets

import msgspec

__all__ = ["STEP_ROW", "TracedRow", "WorkerSpan", "draft_spans", "forward_spans"]

STEP_ROW = -1
"""The row of a :class:`TracedRow` that stands for the whole step."""


class TracedRow(msgspec.Struct, frozen=True, array_like=True):
    """A row of a step that belongs to a sampled trace. ``traceparent``: its parent span."""

    row: int
    traceparent: str


class WorkerSpan(msgspec.Struct, frozen=True, array_like=True):
    """A span on its way to the exporter. Times are ``time.monotonic`` seconds, which all processes of one machine
    share."""

    name: str
    traceparent: str  # its own
    parent: str  # span id, 16 hexadecimal digits
    start: float
    end: float
    pid: int
    attributes: dict[str, int | float]


def forward_spans(
    rows: tuple[TracedRow, ...], start: float, end: float, **attributes: int | float
) -> tuple[WorkerSpan, ...]:
    """One span named ``forward`` for each traced row of a step that ran from ``start`` to ``end``."""
    pid = os.getpid()
    spans = []
    for traced in rows:
        version, trace, parent, flags = traced.traceparent.split("-")
        own = f"{version}-{trace}-{secrets.token_hex(8)}-{flags}"
        values = attributes if traced.row == STEP_ROW else {**attributes, "row": traced.row}
        spans.append(WorkerSpan("forward", own, parent, start, end, pid, values))
    return tuple(spans)


def draft_spans(
    forwards: tuple[WorkerSpan, ...], draft: float, verify: float, drafted: int, accepted: int
) -> tuple[WorkerSpan, ...]:
    """``spec_draft`` and ``spec_verify`` beside each ``forward`` of a step with draft tokens: its first ``draft``
    seconds and its last ``verify`` seconds. ``drafted`` tokens were verified and ``accepted`` of them accepted."""
    spans = []
    for forward in forwards:
        if "row" in forward.attributes:
            continue
        version, trace, _, flags = forward.traceparent.split("-")
        length = forward.end - forward.start
        for name, start, end, values in (
            ("spec_draft", forward.start, forward.start + min(draft, length), {"drafted": drafted}),
            ("spec_verify", forward.end - min(verify, length), forward.end, {"accepted": accepted}),
        ):
            own = f"{version}-{trace}-{secrets.token_hex(8)}-{flags}"
            attributes: dict[str, int | float] = {**values}
            spans.append(WorkerSpan(name, own, forward.parent, start, end, forward.pid, attributes))
    return tuple(spans)
