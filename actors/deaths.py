"""How the death of an actor is told."""

from __future__ import annotations

import logging

from actors.runtime import ChildCrash, Event
from telemetry.log_lines import Event as LogEvent

__all__ = ["log_death", "reason"]

_log = logging.getLogger("troupe.engine")


def reason(cause: BaseException | None) -> str:
    """What an actor died of, without the traceback of its process: that is in the log."""
    if cause is None:
        return "the log says why"
    return cause.reason if isinstance(cause, ChildCrash) else f"{type(cause).__name__}: {cause}"


def log_death(event: Event, **details: object) -> None:
    """An actor's death in the log, once, with what it takes to find its reason."""
    cause = event.cause
    told = isinstance(cause, ChildCrash) and not cause.detail  # then the reason is all there is
    fields = {"actor": event.actor, "incarnation": event.incarnation, **details}
    line = LogEvent(f"Actor {event.actor} died: {reason(cause)}", fields)
    _log.error(line, exc_info=None if told else cause, extra={"actor": event.actor})
