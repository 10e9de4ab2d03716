"""What a worker process adds to the traces of requests: spans as plain data, made there and exported by the engine.

A worker has no exporter and no OpenTelemetry. A step names the rows that are traced; the answer brings the spans back.
"""

from __future__ import annotations

import os
import secrets

import msgspec

__all__ = ["STEP_ROW", "TracedRow", "WorkerSpan", "forward_spans", "guess_spans"]

STEP_ROW = -1
"""The row of a :class:`TracedRow` that stands for the whole step."""


class TracedRow(msgspec.Struct, frozen=True, array_like=True):
    """A row of a step whose work belongs to a sampled trace; ``traceparent`` names the span that is its parent."""

    row: int
    traceparent: str


class WorkerSpan(msgspec.Struct, frozen=True, array_like=True):
    """A span under way to the exporter. Times are ``time.monotonic`` seconds, which one machine's processes share."""

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
        told = attributes if traced.row == STEP_ROW else {**attributes, "row": traced.row}
        spans.append(WorkerSpan("forward", own, parent, start, end, pid, told))
    return tuple(spans)


def guess_spans(
    forwards: tuple[WorkerSpan, ...], draft: float, verify: float, drafted: int, accepted: int
) -> tuple[WorkerSpan, ...]:
    """``spec_draft`` and ``spec_verify`` beside each ``forward`` of a whole step that verified guesses: its first
    ``draft`` seconds and its last ``verify``. ``drafted`` guesses were verified, ``accepted`` of them were right.
    """
    spans = []
    for forward in forwards:
        if "row" in forward.attributes:
            continue
        version, trace, _, flags = forward.traceparent.split("-")
        length = forward.end - forward.start
        for name, start, end, told in (
            ("spec_draft", forward.start, forward.start + min(draft, length), {"drafted": drafted}),
            ("spec_verify", forward.end - min(verify, length), forward.end, {"accepted": accepted}),
        ):
            own = f"{version}-{trace}-{secrets.token_hex(8)}-{flags}"
            attributes: dict[str, int | float] = {**told}
            spans.append(WorkerSpan(name, own, forward.parent, start, end, forward.pid, attributes))
    return tuple(spans)
