"""Actors and the declaration of their message handlers."""

import asyncio
import inspect
import types
import typing
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, overload

from actors.runtime.core.context import ActorContext
from actors.runtime.core.message import Message, reply_type

__all__ = ["Actor", "Deferred", "EarlyReply", "Handler", "Later", "handlers_of", "handles", "handles_in_thread"]

P = TypeVar("P")
R = TypeVar("R")
S = TypeVar("S")
M = TypeVar("M", bound=Message[Any, Any])
F = TypeVar("F", bound=Callable[..., Any])


Deferred = asyncio.Future
"""A deferred reply of a plain handler: the actor handles its next message meanwhile.

The reply is sent when the future is done. A RequestError in it goes to the caller; any other exception is a crash. A
future that is unfinished at the end of its incarnation fails the ask with ActorDied.
"""


Later = Future
"""A deferred reply of a handler in the actor's thread; the thread that completes it sends it."""


@dataclass(frozen=True)
class EarlyReply(Generic[R]):
    """A reply of a handler in the actor's thread, sent before ``then`` is called there. An exception of ``then`` is a
    crash."""

    answer: R
    then: Callable[[], None]


class Handler(NamedTuple):
    """A method that handles a message type; ``awaits``: whether it is a coroutine function; ``in_thread``: whether it
    runs in the actor's thread."""

    method: str
    awaits: bool
    in_thread: bool = False


class _Handles(Protocol[R]):
    @overload
    def __call__(self, method: Callable[[S, M], Awaitable[R]], /) -> Callable[[S, M], Awaitable[R]]: ...
    @overload
    def __call__(self, method: Callable[[S, M], R], /) -> Callable[[S, M], R]: ...


@overload
def handles(target: type[Message[Any, R]], /) -> _Handles[R]: ...
@overload
def handles(target: F, /) -> F: ...
def handles(target: Any, /) -> Any:
    """Mark a method of an actor as the handler of a message type.

    ``@handles`` takes the type from the annotation of the method's parameter (a union means each of its members) and
    compares the return annotation with the message's reply when the class is created. ``@handles(Match)`` names the
    type; then a type checker compares the reply too. A plain method runs without a coroutine, which is cheaper.
    """
    if isinstance(target, type) and issubclass(target, Message):
        message = target

        def mark(method: Any) -> Any:
            method.__handles__ = message
            return method

        return mark
    if not inspect.isfunction(target):
        raise TypeError(f"@handles marks a method or takes a message type, got {target!r}")
    target.__handles__ = None  # type: ignore[attr-defined]
    return target


def handles_in_thread(target: F, /) -> F:
    """Mark a plain method of an actor in a child process as the handler of a message type, to run in a thread.

    These messages have a separate socket. One thread reads, handles and answers them one at a time, in the order of
    sending, beside the mailbox. The window of the lane applies to them too. No other thread is woken, since that costs
    more than handling a small message. The method takes the message and its send time (seconds of the monotonic clock,
    which all processes of a host share). It returns the reply, a :data:`Later` or an :class:`Answered`. Errors are
    handled as elsewhere, but a deadline only ends the caller's wait. An orderly stop waits for the current message.
    """
    handles(target)
    target.__in_thread__ = True  # type: ignore[attr-defined]
    return target


class Actor(Generic[P]):
    """Handles the messages of protocol ``P``, one at a time.

    The next message waits until the handler has returned, even while it awaits. An exception derived from RequestError
    goes to the caller. Any other exception is a crash: the caller gets ActorDied and the supervisor decides what
    happens next. After a restart a new instance has the same ref and the same mailbox.
    """

    context: ActorContext[P]
    """Set by the system before ``started``."""

    _handlers: dict[type[Message[Any, Any]], Handler] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._handlers = None
        try:
            handlers_of(cls)
        except NameError:  # an annotation names something defined later in the module: the first spawn checks again
            cls._handlers = None

    def _handler_table(self) -> dict[type[Message[Any, Any]], Handler]:
        return handlers_of(type(self))

    @classmethod
    def prepare(cls, *config: Any) -> None:
        """Do work that needs no incarnation, such as imports, in a child process before it starts.

        ``config``: the arguments of the constructor. A standby child has already done this when it takes over. It must
        not acquire exclusive resources. Errors are dropped here; ``started`` should raise them again.
        """

    async def started(self) -> None:
        """Runs before the first message of each incarnation. Raising here counts as a crash."""

    async def stopping(self) -> None:
        """Runs after the last message of an orderly stop, and not after a crash.

        A child process ends after it without waiting for threads: end the actor's own threads here.
        """


def handlers_of(actor: type[Actor[Any]]) -> dict[type[Message[Any, Any]], Handler]:
    """The handler of each message type of an actor class. Raises TypeError for conflicting or malformed handlers."""
    if actor._handlers is not None:
        return actor._handlers
    table: dict[type[Message[Any, Any]], Handler] = {}
    names = dict.fromkeys(name for cls in reversed(actor.__mro__) for name in vars(cls))
    for name in names:
        # An override of a handler handles the same messages, unless it is marked again.
        marked = next((vars(cls)[name] for cls in actor.__mro__ if hasattr(vars(cls).get(name), "__handles__")), None)
        if marked is None:
            continue
        method = inspect.getattr_static(actor, name)
        where = f"{actor.__name__}.{name}"
        for message in _handled_types(marked, where):
            if message in table:
                raise TypeError(f"{where} and {table[message].method} both handle {message.__name__}: keep one of them")
            _check_reply(method, message, where)
            in_thread = hasattr(marked, "__in_thread__")
            if in_thread and inspect.iscoroutinefunction(method):
                raise TypeError(f"{where} runs in a thread: make it a plain method")
            table[message] = Handler(name, inspect.iscoroutinefunction(method), in_thread)
    actor._handlers = table
    return table


def _handled_types(method: Any, where: str) -> list[type[Message[Any, Any]]]:
    if method.__handles__ is not None:
        return [method.__handles__]
    parameters = list(inspect.signature(method).parameters)
    if hasattr(method, "__in_thread__") and len(parameters) != 3:
        raise TypeError(f"{where} must take self, one message and its send time")
    if not hasattr(method, "__in_thread__") and len(parameters) != 2:
        raise TypeError(f"{where} must take self and one message")
    annotation = typing.get_type_hints(method).get(parameters[1])
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members: list[Any] = list(typing.get_args(annotation)) if union else [annotation]
    for member in members:
        if not (isinstance(member, type) and issubclass(member, Message)):
            raise TypeError(f"annotate the parameter of {where} with a message type, or write @handles(TheMessage)")
    return members


def _check_reply(method: Any, message: type[Message[Any, Any]], where: str) -> None:
    """Raise TypeError if the annotated return type clearly differs from the message's reply type."""
    promised = reply_type(message)
    returned = typing.get_type_hints(method).get("return", promised)
    if isinstance(promised, type) and isinstance(returned, type) and not issubclass(returned, promised):
        raise TypeError(
            f"{where} returns {returned.__name__}, but {message.__name__} promises {promised.__name__}: "
            f"change the return type or the reply type of the message"
        )
