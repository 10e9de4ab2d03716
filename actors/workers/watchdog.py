"""Watchdog: reports slow actors and ends those that hang."""

from __future__ import annotations

import logging

from actors.runtime import ActorStatus, ActorSystem, Hung

__all__ = ["Watchdog"]

_log = logging.getLogger("troupe.watchdog")

_CHECKS_PER_LIMIT = 8
"""Checks within the shorter of the two times: an actor is found at most an eighth of it too late."""


class Watchdog:
    """Times in seconds. An actor that handles one message for longer than ``soft`` is reported once with its stacks;
    after ``hard`` it is killed, and its supervisor replaces it.

    For a worker the time counts from the sending of its oldest step. An idle actor is never reported.
    """

    def __init__(self, system: ActorSystem, *, soft: float, hard: float) -> None:
        self.stalls = 0
        self._system = system
        self._soft = soft
        self._hard = hard
        self._reported: set[tuple[str, int | None, str | None]] = set()

    async def run(self) -> None:
        """Check periodically. After a stall of this loop unread replies may wait, so one check is skipped."""
        clock, interval = self._system.clock, min(self._soft, self._hard) / _CHECKS_PER_LIMIT
        excused = False
        while True:
            due = clock.monotonic() + interval
            await clock.sleep(interval)
            excused = not excused and clock.monotonic() - due > interval
            if not excused:
                self.look()

    def look(self) -> None:
        """Check every actor by the message that it handles now."""
        stalled = set()
        for actor in self._system.describe():
            age = actor.message_age
            if age is None:
                continue
            if age >= self._hard:
                self._end(actor, age)
            elif age >= self._soft:
                stalled.add((actor.name, actor.incarnation, actor.message))
                self._report(actor, age)
        self._reported &= stalled

    def _report(self, actor: ActorStatus, age: float) -> None:
        key = (actor.name, actor.incarnation, actor.message)
        if key in self._reported:
            return
        self._reported.add(key)
        self.stalls += 1
        beat = "" if actor.heartbeat_age is None else f"; last heartbeat {actor.heartbeat_age:.1f} s ago"
        _log.warning(
            "stall: actor %s (process %s) has handled %s for %.1f s, with %d more waiting%s",
            actor.name,
            actor.pid if actor.pid is not None else "of the engine",
            actor.message,
            age,
            sum(actor.mailbox.values()),
            beat,
        )
        self._system.log_stacks(actor.name)

    def _end(self, actor: ActorStatus, age: float) -> None:
        reason = f"handled {actor.message} for {age:.1f} s, over the watchdog's {self._hard:g} s"
        self._system.crash_actor(actor.name, Hung(reason))
