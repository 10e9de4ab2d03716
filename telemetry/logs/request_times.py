"""The times of a request in one flat record, for log lines and files."""

from __future__ import annotations

import logging

from telemetry.timeline import Hop, Mark, RequestTimeline, Value

__all__ = ["RequestTimes", "request_times"]

_log = logging.getLogger("troupe.request_times")


def request_times(timeline: RequestTimeline) -> dict[str, Value | None]:
    """Seconds and counts of an ended request, without any of its text.

    ``queue``, ``prefill`` and ``decode`` are the sums of the choice that took longest; None for hops that it did not
    reach.
    """
    end = timeline.end if timeline.end is not None else timeline.started
    first = min((mark.at for mark in timeline.marks if mark.name == "first_token"), default=None)
    names = [mark.name for mark in timeline.marks]
    return {
        "tokenize": _longest(timeline, "tokenize"),
        "queue": _longest(timeline, "queue"),
        "prefill": _longest(timeline, "prefill"),
        "decode": _longest(timeline, "decode"),
        "first_token": None if first is None else first - timeline.started,
        "total": end - timeline.started,
        "prompt_tokens": timeline.prompt_tokens,
        "cached_tokens": timeline.cached_tokens,
        "output_tokens": timeline.output_tokens,
        "preemptions": names.count("preempted"),
        "worker_deaths": names.count("worker_died"),
    }


def _longest(timeline: RequestTimeline, name: str) -> float | None:
    """Seconds in hops of this name, of the choice with most of them. Chunks of a prefill may overlap, as their steps
    do; overlapping time counts once."""
    sums: dict[int | None, float] = {}
    until: dict[int | None, float] = {}
    for hop in timeline.hops:  # in order of their starts
        if hop.name == name and hop.end is not None:
            start = max(hop.start, until.get(hop.choice, hop.start))
            sums[hop.choice] = sums.get(hop.choice, 0.0) + max(hop.end - start, 0.0)
            until[hop.choice] = max(hop.end, start)
    return max(sums.values(), default=None)


class RequestTimes:
    """Logs the times of each request at its end (``--enable-request-time-stats-logging``)."""

    def began(self, timeline: RequestTimeline) -> None:
        """Recorded at the end."""

    def hop_ended(self, timeline: RequestTimeline, hop: Hop) -> None:
        """Recorded at the end."""

    def marked(self, timeline: RequestTimeline, mark: Mark) -> None:
        """Recorded at the end."""

    def ended(self, timeline: RequestTimeline) -> None:
        if _log.isEnabledFor(logging.INFO) and not timeline.probe:
            times = request_times(timeline).items()
            text = ", ".join(f"{name} {_shown(value)}" for name, value in times if value is not None)
            _log.info("Times of %s: %s", timeline.request_id, text, extra={"request_id": timeline.request_id})


def _shown(value: object) -> str:
    return f"{value * 1000:.1f} ms" if isinstance(value, float) else str(value)
