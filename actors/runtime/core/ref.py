"""The address of an actor."""

import asyncio
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from actors.runtime.core.errors import AskTimeout
from actors.runtime.core.message import Envelope, Message, current_traceparent

if TYPE_CHECKING:
    from actors.runtime.core.cell import Cell

__all__ = ["ActorRef"]

P = TypeVar("P")
R = TypeVar("R")


class ActorRef(Generic[P]):
    """A reference that stays valid across restarts of its actor. Use it only in the event loop of its system."""

    __slots__ = ("_cell", "name")

    def __init__(self, cell: "Cell") -> None:
        self._cell = cell
        self.name = cell.name

    async def tell(self, message: Message[P, None], *, deadline: float | None = None) -> None:
        """Send, and wait while the lane is full.

        A message that is unhandled at ``deadline`` (seconds of the system's monotonic clock) is dropped and counted,
        wherever it waits. A message to a stopped actor becomes a dead letter. Raises UnknownMessage.
        """
        cell = self._cell
        envelope = Envelope(message, current_traceparent.get(), cell.monotonic(), deadline, None)
        if not cell.post(envelope):
            await cell.wait_for_room(envelope)

    def offer(self, message: Message[P, None]) -> None:
        """Send without waiting. Raises MailboxFull or UnknownMessage. A message to a stopped actor becomes a dead
        letter."""
        cell = self._cell
        cell.offer(Envelope(message, current_traceparent.get(), cell.monotonic(), None, None))

    async def ask(self, message: Message[P, R], *, timeout: float) -> R:
        """Send, and wait for the reply for at most ``timeout`` seconds, time in the mailbox included.

        Raises AskTimeout, ActorDied, UnknownMessage, and the RequestError that the handler raised. If the caller is
        cancelled or times out before the handler starts, the message is not handled.
        """
        cell = self._cell
        if cell.task is not None and cell.task is asyncio.current_task():
            raise RuntimeError(f"actor {self.name!r} asks itself and would wait forever: call the method instead")
        future: asyncio.Future[R] = cell.loop.create_future()
        now = cell.monotonic()
        cell.post(Envelope(message, current_traceparent.get(), now, now + timeout, future))
        timer = cell.call_later(timeout, self._expire, future, message, timeout)
        try:
            return await future
        except BaseException:
            if future.done() and not future.cancelled():
                future.exception()  # without this call asyncio logs the exception
            raise
        finally:
            timer.cancel()

    def _expire(self, future: "asyncio.Future[Any]", message: Message[Any, Any], timeout: float) -> None:
        if not future.done():
            self._cell.count_timeout(message)
            future.set_exception(AskTimeout(self.name, type(message).__name__, timeout))

    def is_alive(self) -> bool:
        """False once the actor has stopped permanently; true while it restarts."""
        return not self._cell.closed

    def __repr__(self) -> str:
        return f"<ActorRef {self.name}>"
