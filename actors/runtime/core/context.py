"""ActorContext: an actor's view of its system."""

import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from actors.runtime.core.clock import Clock
from actors.runtime.core.errors import ActorDied, AskTimeout, UnknownMessage
from actors.runtime.core.message import Envelope, Message, current_traceparent
from actors.runtime.core.ref import ActorRef

if TYPE_CHECKING:
    from actors.runtime.core.incarnation import Incarnation
    from actors.runtime.system import ActorSystem

__all__ = ["ActorContext", "Terminated"]

P = TypeVar("P")
Q = TypeVar("Q")
R = TypeVar("R")


class Terminated(Message[Any, None], frozen=True):
    """A watched actor has stopped permanently. ``cause`` is empty after an orderly stop."""

    name: str
    cause: str


class ActorContext(Generic[P]):
    """One incarnation's view of its system. Tasks and watches started here end with the incarnation."""

    def __init__(self, incarnation: "Incarnation") -> None:
        self._incarnation = incarnation
        self._cell = incarnation.cell
        self.ref: ActorRef[P] = ActorRef(self._cell)
        self.name: str = self._cell.name
        self.incarnation: int = incarnation.number
        self.log = logging.getLogger(f"troupe.{self.name}")

    @property
    def system(self) -> "ActorSystem":
        return self._cell.system

    @property
    def clock(self) -> Clock:
        return self._cell.system.clock

    @property
    def is_alive(self) -> bool:
        """Whether this incarnation has not ended. Messages after its end are not sent."""
        return not self._incarnation.ended

    def watch(self, ref: ActorRef[Any]) -> None:
        """Receive one Terminated when the actor of ``ref`` stops permanently, or at once if it already has.

        A restart does not count. The watch ends with this incarnation; watch again in ``started``.
        """
        if Terminated not in self._cell.accepts:
            raise UnknownMessage(self.name, Terminated.__name__)
        ref._cell.add_watcher(self._incarnation)

    def start_soon(
        self, function: Callable[..., Coroutine[Any, Any, object]], *args: object, name: str | None = None
    ) -> None:
        """Run a coroutine function beside the handlers, until it or this incarnation ends.

        An exception in it is a crash of the actor.
        """
        self._incarnation.start_soon(function, args, name)

    def pipe(
        self,
        ref: ActorRef[Q],
        message: Message[Q, R],
        *,
        timeout: float,
        on_reply: Callable[[R], Message[P, None] | None],
        on_error: Callable[[BaseException], Message[P, None]],
    ) -> None:
        """Ask without waiting for the reply, which arrives in this actor's own mailbox.

        ``on_reply`` or ``on_error`` converts it to a message, or to None for none. It is dropped if this incarnation
        has died meanwhile. The reply lane is never full. If the target's lane is, the message waits for room until its
        timeout, so bound the number of pipes in flight (credits).
        """
        cell = ref._cell
        now = cell.monotonic()
        trace = current_traceparent.get()
        pipe = _Pipe(
            self._incarnation, cell.name, type(message).__name__, timeout, trace, on_reply=on_reply, on_error=on_error
        )
        envelope = Envelope(message, trace, now, now + timeout, pipe)
        pipe.timer = cell.call_later(timeout, pipe.expire, cell.count_timeout, message)
        try:
            cell.post(envelope)
        except ActorDied as error:
            pipe.set_exception(error)
        except BaseException:
            pipe.timer.cancel()
            raise

    def parent_tell(self, message: Message[Any, None]) -> None:
        """Send a one-way message to the ``events`` listener given when this actor was spawned."""
        self._cell.emit(message)

    def crash(self, error: BaseException) -> None:
        """Crash as if a handler had raised ``error``. The current handler is cancelled."""
        self._incarnation.crash(error)

    def stop_self(self) -> None:
        """Stop permanently after the current handler."""
        self._incarnation.stop_self()


class _Pipe:
    """The reply slot of a pipe."""

    __slots__ = (
        "_done",
        "incarnation",
        "message",
        "on_error",
        "on_reply",
        "target",
        "timeout",
        "timer",
        "trace",
    )

    def __init__(
        self,
        incarnation: "Incarnation",
        target: str,
        message: str,
        timeout: float,
        trace: str | None,
        *,
        on_reply: Callable[[Any], Message[Any, None] | None],
        on_error: Callable[[BaseException], Message[Any, None]],
    ) -> None:
        self.incarnation = incarnation
        self.target = target
        self.message = message
        self.timeout = timeout
        self.trace = trace
        self.on_reply: Callable[[Any], Message[Any, None] | None] = on_reply
        self.on_error = on_error
        self.timer: Any = None
        self._done = False

    def done(self) -> bool:
        return self._done or self.incarnation.ended

    def set_result(self, result: Any, /) -> None:
        self._deliver(self.on_reply, result)

    def set_exception(self, exception: BaseException, /) -> None:
        self._deliver(self.on_error, exception)

    def expire(self, count: Callable[[Message[Any, Any]], None], message: Message[Any, Any]) -> None:
        if not self.done():
            count(message)
            self._deliver(self.on_error, AskTimeout(self.target, self.message, self.timeout))

    def _deliver(self, make: Callable[[Any], Message[Any, None] | None], value: Any) -> None:
        self._done = True
        self.timer.cancel()
        incarnation = self.incarnation
        if incarnation.ended:
            return
        try:
            message = make(value)
            if message is None:
                return
            incarnation.cell.check(message)
        except Exception as error:
            incarnation.crash(error)
            return
        cell = incarnation.cell
        cell.mailbox.put_reply(Envelope(message, self.trace, cell.monotonic(), None, None))
