"""Events of a system and measurements for an observer."""

import enum
from typing import Protocol

import msgspec

__all__ = ["ActorStatus", "Event", "EventKind", "Observer"]


class EventKind(enum.StrEnum):
    STARTED = "started"
    RESTARTED = "restarted"
    DIED = "died"
    STOPPED = "stopped"
    ESCALATED = "escalated"
    DEAD_LETTER = "dead_letter"


class Event(msgspec.Struct, frozen=True):
    """An event of an actor. ``at``: its time, in seconds of the system's clock. For a death that is the time when it
    was first known, which may be well before the event: a process is reaped first. ``message`` and ``reason`` are set
    for dead letters only."""

    kind: EventKind
    actor: str
    at: float
    incarnation: int | None = None
    cause: BaseException | None = None
    message: str | None = None
    reason: str | None = None
    traceparent: str | None = None


class Observer(Protocol):
    """Receives measurements. Every method is optional; none may raise or block. Times are in seconds."""

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
        """A message was handled after ``wait`` in the mailbox, which now holds ``depth`` more."""

    def ask_timeout(self, actor: str, message: str) -> None: ...

    def dead_letter(self, actor: str, message: str, reason: str) -> None: ...

    def restarted(self, actor: str) -> None: ...


class ActorStatus(msgspec.Struct, frozen=True):
    """One line of ``ActorSystem.describe``. Ages are in seconds."""

    name: str
    state: str
    incarnation: int | None
    pid: int | None
    mailbox: dict[str, int]
    message: str | None
    message_age: float | None
    heartbeat_age: float | None
