"""Cell: the mailbox and the state of an actor across its incarnations."""

import asyncio
import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio

from actors.runtime.core.context import Terminated
from actors.runtime.core.errors import ActorDied, AskTimeout, MailboxFull, UnknownMessage
from actors.runtime.core.events import EventKind
from actors.runtime.core.mailbox import Mailbox
from actors.runtime.core.message import Envelope, Message, current_traceparent
from actors.runtime.core.supervisor import Supervision, Unit

if TYPE_CHECKING:
    from actors.runtime.core.incarnation import Incarnation
    from actors.runtime.process.child_process import Standby
    from actors.runtime.system import ActorSystem

__all__ = ["Cell", "CellSettings", "State"]


class State(enum.StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSettings:
    """How an actor is placed. ``capacity``: messages of the data lane; ``control_capacity``: of the control lane.

    ``group``: name of the actors that restart together, or None. ``stop_timeout``: seconds of an orderly stop.
    """

    name: str
    capacity: int
    control_capacity: int
    supervision: Supervision
    group: str | None
    stop_timeout: float


class Cell:
    """Accepts messages for an actor across its incarnations, and replies with an error when it has stopped."""

    def __init__(
        self,
        system: "ActorSystem",
        settings: CellSettings,
        *,
        make: "Callable[[Cell, int], Incarnation]",
        accepts: frozenset[type[Message[Any, Any]]],
        group: Unit | None,
        emit: Callable[[Message[Any, None]], None],
    ) -> None:
        self.system = system
        self.name = settings.name
        self.accepts = accepts
        self.mailbox = Mailbox(settings.name, settings.capacity, settings.control_capacity)
        self.loop = system.loop
        self.monotonic = system.clock.monotonic
        self.call_later = system.clock.call_later
        self.supervision = settings.supervision
        self.restarts: deque[float] = deque()
        self.solo = Unit(system, [self])
        self.group = group
        self.stop_timeout = settings.stop_timeout
        self.emit = emit
        self.incarnation: Incarnation | None = None
        self.task: asyncio.Task[Any] | None = None  # handles messages; detects an actor that asks itself
        self.watchers: set[Incarnation] = set()
        self.closed = False
        self.cause: BaseException | None = None
        self.fragile = False  # whether a failing first start raises in the spawner rather than reach the supervisor
        self.ready = anyio.Event()  # set when it has started once or is closed
        self.standby: Standby | None = None
        self._make = make
        self._next_number = 0
        self.stopping = False

    # -- incoming messages ---------------------------------------------------------------------------------------

    def check(self, message: Message[Any, Any]) -> None:
        if message.__class__ not in self.accepts:
            raise UnknownMessage(self.name, type(message).__name__)

    def post(self, envelope: Envelope) -> bool:
        """Enqueue a message; False if it has to wait for room."""
        if envelope.message.__class__ not in self.accepts:
            raise UnknownMessage(self.name, type(envelope.message).__name__)
        if self.closed:
            if envelope.reply is not None:
                raise ActorDied(self.name, self.cause)
            self.system.events.dead_letter(self.name, envelope, "stopped")
            return True
        return self.mailbox.submit(envelope)

    def offer(self, envelope: Envelope) -> None:
        self.check(envelope.message)
        if self.closed:
            self.system.events.dead_letter(self.name, envelope, "stopped")
        else:
            self.mailbox.offer(envelope)

    def take_event(self, message: Message[Any, None]) -> None:
        """Enqueue an event of another actor; without room it is a dead letter, since its sender cannot wait."""
        envelope = Envelope(message, current_traceparent.get(), self.monotonic(), None, None)
        try:
            self.offer(envelope)
        except MailboxFull:
            self.system.events.dead_letter(self.name, envelope, "full")

    async def wait_for_room(self, envelope: Envelope) -> None:
        """Wait until a message from ``tell`` that waits for room is enqueued or has become a dead letter."""
        accepted = self.loop.create_future()
        envelope.accepted = accepted
        timer = None
        if envelope.deadline is not None:
            timer = self.call_later(max(0.0, envelope.deadline - self.monotonic()), self._give_up, envelope)
        try:
            await accepted
        finally:
            if timer is not None:
                timer.cancel()

    def _give_up(self, envelope: Envelope) -> None:
        if not envelope.accepted.done():
            envelope.accepted.set_result(False)
            self.system.events.dead_letter(self.name, envelope, "expired")

    # -- messages that will not be handled -----------------------------------------------------------------------

    def count_timeout(self, message: Message[Any, Any]) -> None:
        self.system.events.ask_timeout(self.name, message)

    def expire(self, envelope: Envelope) -> None:
        """Drop a message whose deadline has passed."""
        reply = envelope.reply
        if reply is None:
            self.system.events.dead_letter(self.name, envelope, "expired")
        elif not reply.done():
            limit = (envelope.deadline or 0.0) - envelope.enqueued_at
            self.count_timeout(envelope.message)
            reply.set_exception(AskTimeout(self.name, type(envelope.message).__name__, limit))

    def refuse(self, envelope: Envelope, error: BaseException) -> None:
        """Reply with an error, if the message has a caller."""
        if envelope.reply is None:
            self.system.events.dead_letter(self.name, envelope, "refused", error)
        elif envelope.reply.done():
            self.system.late_replies += 1
        else:
            envelope.reply.set_exception(error)

    def discard(self, envelope: Envelope, reason: str, cause: BaseException | None) -> None:
        """Reply for a message that was accepted and can no longer be handled."""
        if envelope.accepted is not None and not envelope.accepted.done():
            envelope.accepted.set_result(False)
        elif envelope.accepted is not None and envelope.accepted.cancelled():
            return
        if envelope.reply is None:
            self.system.events.dead_letter(self.name, envelope, reason, cause)
        elif not envelope.reply.done():
            envelope.reply.set_exception(ActorDied(self.name, cause))

    def give_back(self, envelope: Envelope, cause: BaseException | None) -> None:
        """Retry or refuse a message that was being handled when its incarnation ended."""
        if envelope.reply is not None or not envelope.message.redeliver:
            self.discard(envelope, "lost in a crash" if cause is not None else "cancelled", cause)
            return
        if cause is not None:
            envelope.crashes += 1
        if envelope.crashes >= 2:
            self.discard(envelope, "poison", cause)
        else:
            self.mailbox.put_first(envelope)

    # -- incarnations ----------------------------------------------------------------------------------------------

    def launch(self) -> "Incarnation":
        """Start the next incarnation. Raises what constructing the actor raises."""
        incarnation = self._make(self, self._next_number)
        self._next_number += 1
        self.incarnation = incarnation
        self.system.start_task(incarnation.run, f"{self.name}#{incarnation.number}")
        return incarnation

    async def start(self) -> None:
        """Start the next incarnation and wait until it has started. Raises the exception of its start."""
        incarnation = self.launch()
        incarnation.awaited = True
        await incarnation.start_over.wait()
        if not incarnation.was_started and incarnation.cause is not None:
            raise incarnation.cause

    async def halt(self) -> None:
        """End the current incarnation, if any; another may start later."""
        if self.incarnation is not None:
            await self.incarnation.stop(self.stop_timeout)

    async def stop(self) -> None:
        """Stop permanently."""
        self.stopping = True
        self.solo.abandon()
        await self.halt()
        self.close(None)

    def incarnation_started(self, incarnation: "Incarnation") -> None:
        self.fragile = False
        self.ready.set()
        kind = EventKind.STARTED if incarnation.number == 0 else EventKind.RESTARTED
        self.system.events.emit(kind, self.name, incarnation.number)

    def incarnation_ended(self, incarnation: "Incarnation") -> None:
        self.incarnation = None
        self.task = None
        for target in incarnation.watched:
            target.watchers.discard(incarnation)
        for _ in self.mailbox.drop_replies():
            pass
        cause = incarnation.cause
        in_hand, untouched = incarnation.unfinished()
        for envelope in reversed(untouched):
            if envelope.reply is None:
                self.mailbox.put_first(envelope)
            else:
                self.discard(envelope, "stopped", cause)
        for envelope in reversed(in_hand):
            self.give_back(envelope, cause)
        if cause is not None:
            self.system.events.emit(EventKind.DIED, self.name, incarnation.number, cause, incarnation.fell_at)
        if self.stopping:
            self.close(None)
        elif incarnation.stop_requested:
            return  # its caller continues
        elif incarnation.stopped_itself:
            self.close(cause)
        elif cause is None:
            self.close(None)  # the whole system was cancelled
        elif self.fragile:
            self.close(cause)
        elif incarnation.was_started or not incarnation.awaited:
            self.report_crash(cause)

    def report_crash(self, cause: BaseException) -> None:
        """Report a crash to the supervisor."""
        if self.system.stopping:
            return
        if self.group is not None and (self.group.busy or self.supervision.restarts_group):
            self.group.on_crash(self, cause)
        else:
            self.solo.on_crash(self, cause)

    def close(self, cause: BaseException | None) -> None:
        """Stop permanently: fail all waiters and free the name."""
        if self.closed:
            return
        self.closed = True
        if self.standby is not None:
            self.standby.dismiss()
        self.cause = cause = cause or self.cause  # an escalated crash is recorded before the stop that follows it
        if self.group is not None:
            self.group.leave(self)
        self.solo.abandon()
        for envelope in list(self.mailbox.drain()):
            self.discard(envelope, "stopped", cause)
        watchers, self.watchers = self.watchers, set()
        for watcher in watchers:
            watcher.watched.discard(self)
            self.tell_end(watcher)
        self.ready.set()
        self.system.events.emit(EventKind.STOPPED, self.name, self._next_number - 1, cause)
        self.system.forget(self)

    def add_watcher(self, watcher: "Incarnation") -> None:
        if watcher.ended:
            return
        if self.closed:
            self.tell_end(watcher)
        else:
            self.watchers.add(watcher)
            watcher.watched.add(self)

    def tell_end(self, watcher: "Incarnation") -> None:
        cause = "" if self.cause is None else f"{type(self.cause).__name__}: {self.cause}"
        envelope = Envelope(Terminated(name=self.name, cause=cause), None, self.monotonic(), None, None)
        watcher.cell.mailbox.put_reply(envelope)

    @property
    def state(self) -> State:
        if self.closed:
            return State.STOPPED
        incarnation = self.incarnation
        if self.stopping or (incarnation is not None and incarnation.stop_requested):
            return State.STOPPING
        if incarnation is None:
            return State.RESTARTING
        if incarnation.was_started:
            return State.RUNNING
        return State.STARTING if incarnation.number == 0 else State.RESTARTING
