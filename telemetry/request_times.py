"""Where a request's time went, in one flat record: for a log line and for a file of them."""

from __future__ import annotations

import logging

from telemetry.request_metrics import sequence_spans
from telemetry.timeline import Hop, Mark, RequestTimeline, Value

__all__ = ["RequestTimes", "request_times"]

_log = logging.getLogger("troupe.request_times")


def request_times(timeline: RequestTimeline) -> dict[str, Value | None]:
    """Seconds and counts of a request that has ended, nothing of what it said.

    ``queue``, ``prefill`` and ``decode`` are those of the choice that took longest; None for what it never came to.
    """
    end = timeline.end if timeline.end is not None else timeline.started
    spans = [span for span in sequence_spans(timeline).values() if span[0] is not None]
    first = min((mark.at for mark in timeline.marks if mark.name == "first_token"), default=None)
    queued = [hop.end - hop.start for hop in timeline.hops if hop.name == "queue" and hop.end is not None]
    encoded = [hop.end - hop.start for hop in timeline.hops if hop.name == "tokenize" and hop.end is not None]
    prefilled = [begun - placed for placed, begun, _, _ in spans if placed is not None and begun is not None]
    decoded = [last - begun for _, begun, last, _ in spans if begun is not None]
    names = [mark.name for mark in timeline.marks]
    return {
        "tokenize": sum(encoded) if encoded else None,
        "queue": max(queued, default=None),
        "prefill": max(prefilled, default=None),
        "decode": max(decoded, default=None),
        "first_token": None if first is None else first - timeline.started,
        "total": end - timeline.started,
        "prompt_tokens": timeline.prompt_tokens,
        "cached_tokens": timeline.cached_tokens,
        "output_tokens": timeline.output_tokens,
        "preemptions": names.count("preempted"),
        "worker_deaths": names.count("worker_died"),
    }


class RequestTimes:
    """Listens to timelines and logs each one's times at its end (``--enable-request-time-stats-logging``)."""

    def began(self, timeline: RequestTimeline) -> None:
        """Told at the end."""

    def hop_ended(self, timeline: RequestTimeline, hop: Hop) -> None:
        """Told at the end."""

    def marked(self, timeline: RequestTimeline, mark: Mark) -> None:
        """Told at the end."""

    def ended(self, timeline: RequestTimeline) -> None:
        if _log.isEnabledFor(logging.INFO):
            times = request_times(timeline).items()
            text = ", ".join(f"{name} {_shown(value)}" for name, value in times if value is not None)
            _log.info("Times of %s: %s", timeline.request_id, text, extra={"request_id": timeline.request_id})


def _shown(value: object) -> str:
    return f"{value * 1000:.1f} ms" if isinstance(value, float) else str(value)
