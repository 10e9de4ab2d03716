"""ActorMessages: messages through the mailboxes, counted for each actor and message.

The actor runtime calls this for every message, so it only adds to plain numbers. Readers (the metrics at a scrape, the
live page) read the attributes.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter

from telemetry.metrics.histogram import Histogram

__all__ = ["ActorMessages", "Flow"]

_SECONDS = (0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)
_RECOVERY = (0.01, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)


class Flow:
    """Messages of one kind to one actor. ``depth``: messages left in the mailbox when the last one was handled."""

    __slots__ = ("depth", "errors", "handling", "waiting")

    def __init__(self) -> None:
        self.waiting = Histogram(_SECONDS)  # seconds in the mailbox
        self.handling = Histogram(_SECONDS)  # seconds in the handler, or until a deferred reply
        self.errors = 0
        self.depth = 0

    @property
    def count(self) -> int:
        return self.handling.count

    @property
    def wait_seconds(self) -> float:
        """The sum of all waits."""
        return self.waiting.total

    @property
    def busy_seconds(self) -> float:
        """The sum of all handling times."""
        return self.handling.total


class ActorMessages:
    """The observer of an actor system (``actors.runtime.Observer``). All counts are since the start."""

    def __init__(self) -> None:
        self.flows: dict[tuple[str, str], Flow] = {}  # by actor and message
        self.ask_timeouts: Counter[tuple[str, str]] = Counter()  # by actor and message
        self.dead_letters: Counter[tuple[str, str, str]] = Counter()  # by actor, message and reason
        self.restarts: Counter[tuple[str, str]] = Counter()  # by actor and error
        self.recovery: dict[tuple[str], Histogram] = {}  # by actor: seconds from a death to the restart
        self._deaths: dict[str, tuple[str, float]] = {}

    def handled(
        self,
        actor: str,
        message: str,
        *,
        wait: float,
        duration: float,
        depth: int,
        traceparent: str | None,
        error: BaseException | None,
    ) -> None:
        flow = self.flows.get((actor, message))
        if flow is None:
            flow = self.flows[actor, message] = Flow()
        # Histogram.add inlined: this runs for every message, and the two calls would double its cost
        histogram = flow.waiting
        histogram.counts[bisect_left(_SECONDS, wait)] += 1
        histogram.total += wait
        histogram = flow.handling
        histogram.counts[bisect_left(_SECONDS, duration)] += 1
        histogram.total += duration
        flow.depth = depth
        if error is not None:
            flow.errors += 1

    def ask_timeout(self, actor: str, message: str) -> None:
        self.ask_timeouts[actor, message] += 1

    def dead_letter(self, actor: str, message: str, reason: str) -> None:
        self.dead_letters[actor, message, reason] += 1

    def died(self, actor: str, cause: BaseException | None, at: float) -> None:
        """Record the death of an actor at ``at`` (monotonic seconds). The time until its restart is its recovery."""
        _, since = self._deaths.get(actor, ("", at))
        self._deaths[actor] = (type(cause).__name__ if cause is not None else "unknown", since)

    def restarted(self, actor: str) -> None:
        """Record a restart. Without its own death an actor was restarted with its group."""
        cause, since = self._deaths.pop(actor, ("group", None))
        self.restarts[actor, cause] += 1
        if since is not None:
            self.recovery.setdefault((actor,), Histogram(_RECOVERY)).add(time.monotonic() - since)
