"""Incarnation: one run of an actor, from ``started`` to its end. A restart is a new one with the same mailbox."""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import anyio
import anyio.abc

from actors.runtime.core.actor import Actor
from actors.runtime.core.clock import Timer
from actors.runtime.core.context import ActorContext
from actors.runtime.core.errors import HandlerCancelled, RequestError, UnknownMessage
from actors.runtime.core.message import Envelope, current_actor, current_traceparent
from actors.runtime.core.stacks import of_task, of_threads

if TYPE_CHECKING:
    from actors.runtime.core.cell import Cell

__all__ = ["Incarnation", "LocalIncarnation"]

_STREAK = 64
"""Messages handled before the other tasks of the loop run."""


class Incarnation(ABC):
    """The base of all placements: a task that starts, serves until asked to stop, and ends with a cause."""

    pid: int | None = None

    def __init__(self, cell: "Cell", number: int) -> None:
        self.cell = cell
        self.number = number
        self.was_started = False
        self.awaited = False  # whether a caller awaits the start and handles its failure
        self.stop_requested = False
        self.stopped_itself = False
        self.ended = False
        self.cause: BaseException | None = None
        self.fell_at: float | None = None  # when it was first known that it has ended or must end
        self.start_over = anyio.Event()  # set when it has started or ended
        self.finished = anyio.Event()
        self.watched: set[Cell] = set()
        self._overdue: Timer | None = None

    @abstractmethod
    async def run(self) -> None:
        """Start, serve until asked to stop, end."""

    @abstractmethod
    def request_stop(self) -> None:
        """Stop in order after the current message."""

    @abstractmethod
    def cancel(self) -> None:
        """End now."""

    @abstractmethod
    def crash(self, error: BaseException) -> None:
        """End now, because of ``error``."""

    def _fall(self) -> None:
        if self.fell_at is None:
            self.fell_at = self.cell.monotonic()

    def _blame(self, error: BaseException) -> None:
        self._fall()
        if self.cause is None:
            self.cause = error

    @abstractmethod
    def in_hand(self) -> Envelope | None:
        """The message being handled."""

    def unfinished(self) -> tuple[list[Envelope], list[Envelope]]:
        """Messages that were being handled at its end, and those received but not begun; the oldest first."""
        in_hand = self.in_hand()
        return ([] if in_hand is None else [in_hand]), []

    @abstractmethod
    def since(self) -> float:
        """When the handling of the current message began."""

    def heartbeat_age(self) -> float | None:
        return None

    @abstractmethod
    def log_stacks(self) -> None:
        """Log its stacks, without blocking."""

    @abstractmethod
    def start_soon(
        self, function: Callable[..., Coroutine[Any, Any, object]], args: tuple[object, ...], name: str | None
    ) -> None:
        """Run a coroutine function beside the handlers; an exception in it is a crash."""

    def stop_self(self) -> None:
        self.stopped_itself = True
        self.request_stop()

    async def stop(self, timeout: float) -> None:
        """Request a stop, and cancel after ``timeout`` seconds. Returns when it has ended.

        The stop completes even if the caller is cancelled meanwhile.
        """
        if not self.ended and not self.stop_requested:
            self.stop_requested = True
            self._overdue = self.cell.call_later(timeout, self._end_overdue, timeout)
            self.request_stop()
        await self.finished.wait()

    def _end_overdue(self, timeout: float) -> None:
        self.cell.system.logger.warning("actor %s did not stop within %g s: cancelled", self.cell.name, timeout)
        self.cancel()

    def mark_started(self) -> None:
        self.was_started = True
        self.start_over.set()
        self.cell.incarnation_started(self)

    def mark_ended(self) -> None:
        if self.ended:
            return
        self.ended = True
        if self._overdue is not None:
            self._overdue.cancel()
        self.cell.incarnation_ended(self)
        self.start_over.set()
        self.finished.set()


class LocalIncarnation(Incarnation):
    """An actor in the event loop of its system: one task that handles messages, and a task group for its own tasks."""

    def __init__(self, cell: "Cell", number: int, actor: Actor[Any]) -> None:
        super().__init__(cell, number)
        self._actor = actor
        self._table = {
            message: (getattr(actor, handler.method), handler.awaits)
            for message, handler in actor._handler_table().items()
        }
        self._tasks: anyio.abc.TaskGroup | None = None
        self._halting = False
        self._current: Envelope | None = None
        self._since = 0.0
        self._deferred: dict[asyncio.Future[Any], tuple[Envelope, float]] = {}
        actor.context = ActorContext(self)

    async def run(self) -> None:
        current_actor.set(self.cell.name)
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                self.cell.task = asyncio.current_task()
                try:
                    await self._live()
                except asyncio.CancelledError:
                    if self._is_over():
                        raise
                    self._blame(HandlerCancelled("cancelled from outside while it started or stopped"))
                except (KeyboardInterrupt, GeneratorExit):
                    raise
                except BaseException as error:  # a library's panic is a crash of this actor only
                    self._blame(error)
                tasks.cancel_scope.cancel()
        finally:
            self.mark_ended()

    async def _live(self) -> None:
        if self._halting:  # stopped or crashed before its start
            return
        await self._actor.started()
        if not self._halting:
            self.mark_started()
            await self._serve()
        if self.cause is None:
            await self.before_stopping()
        if self.cause is None:
            await self._actor.stopping()

    async def before_stopping(self) -> None:
        """Runs after the last message of an orderly stop, before the actor's own ``stopping``."""

    async def _serve(self) -> None:
        cell = self.cell
        mailbox, loop, monotonic, table = cell.mailbox, cell.loop, cell.monotonic, self._table
        pause, handled = cell.system.pause, cell.system.events.handled
        trace: str | None = None
        current_traceparent.set(None)
        streak = 0
        while not self._halting:
            if pause is not None:
                await pause()
                if self._halting:
                    break
            envelope = mailbox.take()
            if envelope is None:
                streak = 0
                try:
                    await mailbox.wait(loop)
                except asyncio.CancelledError:
                    self._survive_cancellation()
                continue
            reply, message = envelope.reply, envelope.message
            if reply is not None and reply.done():
                continue  # its caller has given up
            now = monotonic()
            if envelope.deadline is not None and envelope.deadline <= now:
                cell.expire(envelope)
                continue
            if envelope.traceparent is not trace:
                trace = envelope.traceparent
                current_traceparent.set(trace)
            entry = table.get(message.__class__)
            if entry is None:  # the restarted class does not handle it
                cell.refuse(envelope, UnknownMessage(cell.name, type(message).__name__))
                continue
            self._current, self._since = envelope, now
            failure: BaseException | None = None
            try:
                result = entry[0](message)
                if entry[1]:
                    result = await result
            except RequestError as error:
                failure = error
            except asyncio.CancelledError:
                self._survive_cancellation()
                failure = HandlerCancelled(f"the handler of {type(message).__name__} in {cell.name} was cancelled")
            if self.cause is not None:
                return
            self._current = None
            if failure is None and isinstance(result, asyncio.Future):
                self._deferred[result] = (envelope, now)
                result.add_done_callback(self._answer_deferred)
                continue
            if failure is not None:
                cell.refuse(envelope, failure)
            elif reply is not None:
                if reply.done():
                    cell.system.late_replies += 1
                else:
                    reply.set_result(result)
            if handled is not None:
                handled(cell, envelope, now - envelope.enqueued_at, monotonic() - now, failure)
            streak += 1
            if streak == _STREAK:
                streak = 0
                try:
                    await asyncio.sleep(0)
                except asyncio.CancelledError:
                    self._survive_cancellation()

    def _answer_deferred(self, future: "asyncio.Future[Any]") -> None:
        """Send a deferred reply."""
        entry = self._deferred.pop(future, None)
        error = None if future.cancelled() else future.exception()
        if entry is None or self.ended or self.cause is not None:
            return
        envelope, began = entry
        cell = self.cell
        if future.cancelled():
            error = HandlerCancelled(f"the deferred answer to {type(envelope.message).__name__} was cancelled")
        if error is not None and not isinstance(error, RequestError):
            self._deferred[future] = entry  # unfinished: it gets a reply when this incarnation has ended
            self.crash(error)
            return
        if error is not None:
            cell.refuse(envelope, error)
        elif envelope.reply is not None:
            if envelope.reply.done():
                cell.system.late_replies += 1
            else:
                envelope.reply.set_result(future.result())
        if cell.system.events.handled is not None:
            cell.system.events.handled(cell, envelope, began - envelope.enqueued_at, cell.monotonic() - began, error)

    def unfinished(self) -> tuple[list[Envelope], list[Envelope]]:
        in_hand = [envelope for envelope, _ in self._deferred.values()]
        if self._current is not None:
            in_hand.append(self._current)
        for future in list(self._deferred):
            future.cancel()
        self._deferred.clear()
        return in_hand, []

    def _is_over(self) -> bool:
        assert self._tasks is not None
        return self._tasks.cancel_scope.cancel_called or anyio.current_effective_deadline() == -math.inf

    def _survive_cancellation(self) -> None:
        """Re-raise a cancellation that ends this incarnation; undo any other one."""
        if self._is_over():
            raise
        task = asyncio.current_task()
        assert task is not None
        while task.cancelling():
            task.uncancel()

    def crash(self, error: BaseException) -> None:
        if self.ended:
            return
        self._blame(error)
        self.cancel()

    def cancel(self) -> None:
        self._halting = True
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()

    def request_stop(self) -> None:
        self._halting = True
        self.cell.mailbox.wake()

    def start_soon(
        self, function: Callable[..., Coroutine[Any, Any, object]], args: tuple[object, ...], name: str | None
    ) -> None:
        if self._tasks is None or self.ended:
            raise RuntimeError(f"actor {self.cell.name!r} is not running: start tasks from started() or from a handler")
        self._tasks.start_soon(self._guard, function, args, name=name or f"{self.cell.name}:{function!r}")

    async def _guard(self, function: Callable[..., Coroutine[Any, Any, object]], args: tuple[object, ...]) -> None:
        try:
            await function(*args)
        except (KeyboardInterrupt, GeneratorExit, asyncio.CancelledError):
            raise
        except BaseException as error:
            self.crash(error)

    def log_stacks(self) -> None:
        if self.cell.task is not None:
            stands = of_task(self.cell.task)
            if self._deferred:  # the deferred reply may come from a thread
                stands += "\n" + of_threads()
            self.cell.system.logger.warning("stacks of actor %s:\n%s", self.cell.name, stands)

    def in_hand(self) -> Envelope | None:
        """The message being handled, or an earlier one with a deferred reply."""
        return next(iter(self._deferred.values()))[0] if self._deferred else self._current

    def since(self) -> float:
        return next(iter(self._deferred.values()))[1] if self._deferred else self._since
