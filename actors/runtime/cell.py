"""The place of an actor in its system: it has the mailbox, and outlives the incarnations."""

import asyncio
import enum
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import anyio

from actors.runtime.context import Terminated
from actors.runtime.errors import ActorDied, AskTimeout, MailboxFull, UnknownMessage
from actors.runtime.events import EventKind
from actors.runtime.mailbox import Mailbox
from actors.runtime.message import Envelope, Message, current_traceparent
from actors.runtime.supervisor import Supervision, Unit

if TYPE_CHECKING:
    from actors.runtime.child_process import Standby
    from actors.runtime.incarnation import Incarnation
    from actors.runtime.system import ActorSystem

__all__ = ["Cell", "State"]


class State(enum.StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"


class Cell:
    """Takes messages in for an actor, whichever incarnation it is in, and answers for it when it is gone."""

    def __init__(
        self,
        system: "ActorSystem",
        name: str,
        *,
        make: "Callable[[Cell, int], Incarnation]",
        accepts: frozenset[type[Message[Any, Any]]],
        capacity: int,
        control_capacity: int,
        supervision: Supervision,
        group: Unit | None,
        stop_timeout: float,
        emit: Callable[[Message[Any, None]], None],
    ) -> None:
        self.system = system
        self.name = name
        self.accepts = accepts
        self.mailbox = Mailbox(name, capacity, control_capacity)
        self.loop = system.loop
        self.monotonic = system.clock.monotonic
        self.call_later = system.clock.call_later
        self.supervision = supervision
        self.restarts: deque[float] = deque()
        self.solo = Unit(system, [self])
        self.group = group
        self.stop_timeout = stop_timeout
        self.emit = emit
        self.incarnation: Incarnation | None = None
        self.task: asyncio.Task[Any] | None = None  # the one that handles messages, to catch an actor asking itself
        self.watchers: set[Incarnation] = set()
        self.closed = False
        self.cause: BaseException | None = None
        self.fragile = False  # a failing first start is its spawner's affair, not the supervisor's
        self.ready = anyio.Event()  # started once, or closed
        self.standby: Standby | None = None
        self._make = make
        self._next_number = 0
        self.stopping = False

    # -- messages in ---------------------------------------------------------------------------------------------

    def check(self, message: Message[Any, Any]) -> None:
        if message.__class__ not in self.accepts:
            raise UnknownMessage(self.name, type(message).__name__)

    def post(self, envelope: Envelope) -> bool:
        """Put in or stand in line; False while a message stands in line for room."""
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
        """Take an event of another actor; one that finds no room is a dead letter, for its sender cannot wait."""
        envelope = Envelope(message, current_traceparent.get(), self.monotonic(), None, None)
        try:
            self.offer(envelope)
        except MailboxFull:
            self.system.events.dead_letter(self.name, envelope, "full")

    async def wait_for_room(self, envelope: Envelope) -> None:
        """Wait until a told message that stands in line is in, or has become a dead letter."""
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

    # -- messages that nobody will handle ------------------------------------------------------------------------

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
        """Answer with an error; a told message has nobody to hear it."""
        if envelope.reply is None:
            self.system.events.dead_letter(self.name, envelope, "refused", error)
        elif envelope.reply.done():
            self.system.late_replies += 1
        else:
            envelope.reply.set_exception(error)

    def bury(self, envelope: Envelope, reason: str, cause: BaseException | None) -> None:
        """Answer for a message that this actor took and can no longer handle."""
        if envelope.accepted is not None and not envelope.accepted.done():
            envelope.accepted.set_result(False)
        elif envelope.accepted is not None and envelope.accepted.cancelled():
            return
        if envelope.reply is None:
            self.system.events.dead_letter(self.name, envelope, reason, cause)
        elif not envelope.reply.done():
            envelope.reply.set_exception(ActorDied(self.name, cause))

    def give_back(self, envelope: Envelope, cause: BaseException | None) -> None:
        """Deal with a message that was in hand when its incarnation ended."""
        if envelope.reply is not None or not envelope.message.redeliver:
            self.bury(envelope, "lost in a crash" if cause is not None else "cancelled", cause)
            return
        if cause is not None:
            envelope.crashes += 1
        if envelope.crashes >= 2:
            self.bury(envelope, "poison", cause)
        else:
            self.mailbox.put_first(envelope)

    # -- life ----------------------------------------------------------------------------------------------------

    def launch(self) -> "Incarnation":
        """Start the next incarnation. Raises what making the actor raises."""
        incarnation = self._make(self, self._next_number)
        self._next_number += 1
        self.incarnation = incarnation
        self.system.start_task(incarnation.run, f"{self.name}#{incarnation.number}")
        return incarnation

    async def start(self) -> None:
        """Start the next incarnation and wait until it has started. Raises what its start raises."""
        incarnation = self.launch()
        incarnation.awaited = True
        await incarnation.settled.wait()
        if not incarnation.was_started and incarnation.cause is not None:
            raise incarnation.cause

    async def halt(self) -> None:
        """End the incarnation, if there is one, to start another later."""
        if self.incarnation is not None:
            await self.incarnation.stop(self.stop_timeout)

    async def stop(self) -> None:
        """Stop for good."""
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
                self.bury(envelope, "stopped", cause)
        for envelope in reversed(in_hand):
            self.give_back(envelope, cause)
        if cause is not None:
            self.system.events.emit(EventKind.DIED, self.name, incarnation.number, cause, incarnation.fell_at)
        if self.stopping:
            self.close(None)
        elif incarnation.stop_requested:
            return  # whoever asked goes on from here
        elif incarnation.stopped_itself:
            self.close(cause)
        elif cause is None:
            self.close(None)  # the whole system was cancelled
        elif self.fragile:
            self.close(cause)
        elif incarnation.was_started or not incarnation.awaited:
            self.fell(cause)

    def fell(self, cause: BaseException) -> None:
        """Hand a crash to the supervisor."""
        if self.system.stopping:
            return
        if self.group is not None and (self.group.busy or self.supervision.restarts_group):
            self.group.fell(self, cause)
        else:
            self.solo.fell(self, cause)

    def close(self, cause: BaseException | None) -> None:
        """The end for good: everyone who waits is told, and the name is free again."""
        if self.closed:
            return
        self.closed = True
        if self.standby is not None:
            self.standby.dismiss()
        self.cause = cause = cause or self.cause  # an escalated crash is known before the stop that follows it
        if self.group is not None:
            self.group.leave(self)
        self.solo.abandon()
        for envelope in list(self.mailbox.drain()):
            self.bury(envelope, "stopped", cause)
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
