"""Messages and envelopes."""

import enum
import typing
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec

__all__ = [
    "Envelope",
    "Lane",
    "Message",
    "ReplySlot",
    "current_actor",
    "current_traceparent",
    "messages_of",
    "protocol_of",
    "reply_type",
]

P = TypeVar("P")
R_co = TypeVar("R_co", covariant=True)

current_traceparent: ContextVar[str | None] = ContextVar("troupe_traceparent", default=None)
"""The W3C traceparent of the current work. The sender copies it into each envelope; it is set again around the
handler."""

current_actor: ContextVar[str | None] = ContextVar("troupe_actor", default=None)
"""The name of the actor whose task this is; for logs."""


class Lane(enum.IntEnum):
    """The lane in which a message waits. Control messages are always taken before data."""

    DATA = 0
    CONTROL = 1


class Message(msgspec.Struct, Generic[P, R_co], frozen=True, tag=True):
    """A message of protocol ``P`` (a marker class, never instantiated) with a reply of type ``R_co``.

    ``Message[P, None]`` may be sent by tell, offer or ask; any other may only be asked. The class name is the tag on
    the wire, so it must be unique within its protocol.
    """

    lane: ClassVar[Lane] = Lane.DATA
    redeliver: ClassVar[bool] = False
    """Redeliver a message from ``tell`` to the next incarnation once if its handler crashed; a second crash makes it
    poison."""
    timed: ClassVar[bool] = True
    """Whether the watchdog checks how long its handler takes; a handler that it skips bounds its own time."""


class ReplySlot(Protocol):
    """The destination of a reply: an asyncio future, a pipe to a mailbox, or a frame to the parent process."""

    def done(self) -> bool: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, exception: BaseException, /) -> None: ...


class Envelope(msgspec.Struct):
    """A message with its delivery data. Times are seconds of the system's monotonic clock."""

    message: Message[Any, Any]
    traceparent: str | None
    enqueued_at: float
    deadline: float | None
    reply: ReplySlot | None
    accepted: Any = None  # a future while a tell waits for room in the lane
    crashes: int = 0


def _arguments(message: type[Message[Any, Any]]) -> tuple[Any, Any]:
    for cls in message.__mro__:
        for base in cls.__dict__.get("__orig_bases__", ()):
            if typing.get_origin(base) is Message:
                protocol, reply = typing.get_args(base)
                return protocol, reply
    raise TypeError(f"{message.__name__} declares no protocol and reply: derive it from Message[Protocol, Reply]")


def protocol_of(message: type[Message[Any, Any]]) -> Any:
    """The marker class of the protocol that ``message`` belongs to."""
    return _arguments(message)[0]


def reply_type(message: type[Message[Any, Any]]) -> Any:
    """The reply type of ``message``; ``type(None)`` for a one-way message."""
    return _arguments(message)[1]


def messages_of(protocol: type) -> Iterator[type[Message[Any, Any]]]:
    """All message classes of a protocol that have been defined so far."""
    pending = Message.__subclasses__()
    while pending:
        message = pending.pop()
        pending.extend(message.__subclasses__())
        if protocol_of(message) is protocol:
            yield message
