"""What a system tells about itself: events for its owner, measurements for an observer."""

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
    """Something that happened to an actor. `at`: when, in seconds of the system's clock; a death's is when it was first
    known, which may be well before its event: a process is seen off first. `message` and `reason` are set for dead
    letters only."""

    kind: EventKind
    actor: str
    at: float
    incarnation: int | None = None
    cause: BaseException | None = None
    message: str | None = None
    reason: str | None = None
    traceparent: str | None = None


class Observer(Protocol):
    """Receives measurements. Every method may be absent; none may raise or wait. Times are in seconds."""

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
        """A message was handled after `wait` in the mailbox, where `depth` more are waiting now."""

    def ask_timeout(self, actor: str, message: str) -> None: ...

    def dead_letter(self, actor: str, message: str, reason: str) -> None: ...

    def restarted(self, actor: str) -> None: ...


class ActorStatus(msgspec.Struct, frozen=True):
    """One line of `ActorSystem.describe`. Ages are in seconds."""

    name: str
    state: str
    incarnation: int | None
    pid: int | None
    mailbox: dict[str, int]
    message: str | None
    message_age: float | None
    heartbeat_age: float | None
