"""The system: spawns actors, owns every task, and stops everything in reverse order."""

import asyncio
import contextvars
import logging
import random
import typing
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
import anyio.abc

from actors.runtime.actor import Actor
from actors.runtime.blank_process import BlankProcess
from actors.runtime.cell import Cell
from actors.runtime.child_process import Standby
from actors.runtime.clock import Clock, SystemClock
from actors.runtime.events import ActorStatus, Event, EventKind, Observer
from actors.runtime.failure import Failure
from actors.runtime.frames import FRAME_LIMIT
from actors.runtime.incarnation import Incarnation, LocalIncarnation
from actors.runtime.message import Message
from actors.runtime.process import ProcessIncarnation
from actors.runtime.process_plan import launch, plan_process
from actors.runtime.ref import ActorRef
from actors.runtime.supervisor import Supervision, Unit
from actors.runtime.system_events import SystemEvents

__all__ = ["ActorSystem", "Events"]

P = TypeVar("P")

Events = ActorRef[Any] | Callable[[Message[Any, None]], None] | None
"""Where an actor's `parent_tell` goes: an actor, a plain function, or nowhere."""


class ActorSystem:
    """Actors in one event loop, and in child processes of it.

    Binds to the running loop when it is entered. All tasks live in one task group inside a task of the system's own,
    so it may be closed from another task than the one that opened it. Closing leaves nothing behind: no task, thread,
    child process or file descriptor; signal handlers, environment and root logger are never touched.

    When a crash escalates, `failed` is set and all actors are stopped; the owner awaits `failed` and leaves.
    """

    loop: asyncio.AbstractEventLoop
    clock: Clock

    def __init__(
        self,
        name: str = "troupe",
        *,
        clock: Clock | None = None,
        observer: Observer | object | None = None,
        pause: Callable[[], Awaitable[None]] | None = None,
        seed: int | None = None,
        log_death: Callable[[Event], None] | None = None,
    ) -> None:
        """`pause` is awaited before each message (a test decides with it who goes first); `seed` is of the jitter.

        `log_death` logs an actor's death in place of the system: its owner may know more of it.
        """
        self.name = name
        self.logger = logging.getLogger("troupe.runtime")
        self.random = random.Random(seed)
        self.pause = pause
        self.failed = Failure()
        self.stopping = False
        self.late_replies = 0
        self._clock = clock
        self._cells: dict[str, Cell] = {}
        self._groups: dict[str, Unit] = {}
        self._host: asyncio.Task[None] | None = None
        self._tasks: anyio.abc.TaskGroup | None = None
        self.events = SystemEvents(self.logger, log_death, observer, lambda: self.clock.monotonic())

    # -- opening and closing -------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._host is not None:
            raise RuntimeError("an actor system is entered once; make another")
        self.loop = asyncio.get_running_loop()
        self.clock = self._clock or SystemClock()
        self._wake = anyio.Event()
        ready = anyio.Event()
        # An empty context: no span or context variable of the opener leaks into the actors.
        self._host = self.loop.create_task(
            self._run(ready), name=f"{self.name} actor system", context=contextvars.Context()
        )
        try:
            await ready.wait()
        except asyncio.CancelledError:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def _run(self, ready: anyio.Event) -> None:
        try:
            async with anyio.create_task_group() as self._tasks:
                ready.set()
                await self._wake.wait()
                await self._shut_down()
                self._tasks.cancel_scope.cancel()
        finally:
            self.stopping = True
            for cell in reversed(list(self._cells.values())):
                cell.close(None)
            self._tasks = None

    async def stop(self) -> None:
        """Stop all actors, the last started first, each within its `stop_timeout`. Returns when nothing is left.

        A caller that is cancelled meanwhile makes it short: everything is cancelled or killed before it returns.
        """
        host = self._host
        if host is None:
            return
        self.request_stop()
        if host is asyncio.current_task():
            raise RuntimeError("the system cannot wait for its own end")
        try:
            await asyncio.wait([host])
        except asyncio.CancelledError:
            host.cancel()
            await asyncio.wait([host])
            raise
        if not host.cancelled():
            host.result()

    def request_stop(self) -> None:
        """Begin to stop; `stop` waits for the end."""
        self.stopping = True
        self._wake.set()

    async def _shut_down(self) -> None:
        self.stopping = True
        for unit in self._groups.values():
            unit.abandon()
        for cell in self._cells.values():
            cell.solo.abandon()
        while self._cells:
            await next(reversed(self._cells.values())).stop()

    def start_task(self, function: Callable[..., Coroutine[Any, Any, object]], name: str, *args: object) -> None:
        """Run a coroutine function in the system's task group, in an empty context."""
        if self._tasks is None:
            raise RuntimeError("the actor system does not run: enter it with `async with` first")
        contextvars.Context().run(self._tasks.start_soon, function, *args, name=name)

    # -- spawning ------------------------------------------------------------------------------------------------

    async def spawn(
        self,
        factory: Callable[[], Actor[P]],
        *,
        name: str,
        capacity: int = 1024,
        control_capacity: int = 256,
        supervision: Supervision | None = None,
        group: str | None = None,
        stop_timeout: float = 5.0,
        events: Events = None,
        wait: bool = True,
    ) -> ActorRef[P]:
        """Start an actor in this event loop. `factory` makes a new instance for each incarnation.

        Returns when `started` has returned, and raises what it raised; with `wait=False` returns at once, and a
        failing start is the supervisor's affair.
        """
        first: list[Actor[P]] = [factory()]
        table = first[0]._handler_table()
        if any(handler.in_thread for handler in table.values()):
            raise TypeError(f"{type(first[0]).__name__} handles messages in a thread: place it by spawn_process")
        accepts = frozenset(table)

        def make(cell: Cell, number: int) -> Incarnation:
            return LocalIncarnation(cell, number, first.pop() if first else factory())

        return await self.place(
            make,
            accepts,
            name=name,
            capacity=capacity,
            control_capacity=control_capacity,
            supervision=supervision,
            group=group,
            stop_timeout=stop_timeout,
            events=events,
            wait=wait,
        )

    async def spawn_process(
        self,
        protocol: type[P],
        *,
        name: str,
        target: str,
        config: Any = None,
        config_type: type | None = None,
        environment: Mapping[str, str] | None = None,
        capacity: int = 1024,
        control_capacity: int = 256,
        supervision: Supervision | None = None,
        group: str | None = None,
        start_timeout: float = 600.0,
        stop_timeout: float = 5.0,
        events: Events = None,
        events_type: Any = None,
        heartbeat: float = 1.0,
        heartbeat_timeout: float | None = None,
        window: int = 16,
        frame_limit: int = FRAME_LIMIT,
        standby: bool = False,
        blank: Callable[[], BlankProcess | None] = lambda: None,
        wait: bool = True,
    ) -> ActorRef[P]:
        """Start the actor class `target` ("package.module:Class") in a child process, as `Class(config)`.

        The class is imported in the child only; `protocol` says here which messages it takes. `config` travels as
        msgpack and is decoded as `config_type` (its own type unless given), which both sides must be able to import.
        `environment` is added to the child's alone. What the actor tells its parent goes to `events`; `events_type`
        (a message type or a union) says what may come, and for a ref is what its actor handles unless given. A child
        whose event loop is silent for `heartbeat_timeout` seconds is killed. At most `window` messages of a lane are
        under way to the child; `frame_limit` is in bytes. With `standby` a second child waits, its imports and
        `Actor.prepare` done, to be the next life when this one dies. `blank` gives a process that was
        started before, for the child to be. Waiting and errors are those of `spawn`.
        """
        if events_type is not None:
            types = frozenset(typing.get_args(events_type) or (events_type,))
        else:
            types = events._cell.accepts if isinstance(events, ActorRef) else frozenset()
        plan = plan_process(
            protocol,
            target=target,
            config=config,
            config_type=config_type,
            environment=environment,
            event_types=types,
            start_timeout=start_timeout,
            heartbeat=heartbeat,
            heartbeat_timeout=heartbeat_timeout,
            window=window,
            limit=frame_limit,
        )

        def make(cell: Cell, number: int) -> ProcessIncarnation:
            if standby and cell.standby is None:
                cell.standby = Standby(lambda: launch(cell, plan), self.clock)
                self.start_task(cell.standby.run, f"{cell.name} standby")
            return ProcessIncarnation(cell, number, plan, cell.standby, blank)

        return await self.place(
            make,
            frozenset(plan.replies),
            name=name,
            capacity=capacity,
            control_capacity=control_capacity,
            supervision=supervision,
            group=group,
            stop_timeout=stop_timeout,
            events=events,
            wait=wait,
        )

    async def place(
        self,
        make: Callable[[Cell, int], Incarnation],
        accepts: frozenset[type[Message[Any, Any]]],
        *,
        name: str,
        capacity: int,
        control_capacity: int,
        supervision: Supervision | None,
        group: str | None,
        stop_timeout: float,
        events: Events,
        wait: bool,
    ) -> ActorRef[Any]:
        """Start an actor whose incarnations `make` makes: what every placement comes down to."""
        if self._tasks is None or self.stopping:
            raise RuntimeError(f"cannot spawn {name!r}: the actor system is not running")
        if name in self._cells:
            raise ValueError(f"there is an actor named {name!r} already: names are unique while their actor lives")
        unit = None if group is None else self._groups.setdefault(group, Unit(self, []))
        cell = Cell(
            self,
            name,
            make=make,
            accepts=accepts,
            capacity=capacity,
            control_capacity=control_capacity,
            supervision=supervision or Supervision(),
            group=unit,
            stop_timeout=stop_timeout,
            emit=self._emitter(name, events),
        )
        cell.fragile = wait
        self._cells[name] = cell
        if unit is not None:
            unit.members.append(cell)
        try:
            cell.launch()
            if wait:
                await cell.ready.wait()
        except Exception as error:
            cell.close(error)
            raise
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):
                await cell.stop()
            raise
        if wait and cell.closed:
            raise cell.cause or RuntimeError(f"actor {name!r} was stopped before it had started")
        return ActorRef(cell)

    def _emitter(self, name: str, events: Events) -> Callable[[Message[Any, None]], None]:
        if isinstance(events, ActorRef):
            return events._cell.take_event
        if events is not None:
            return events

        def refuse(message: Message[Any, None]) -> None:
            raise RuntimeError(f"nobody listens to {name!r}: give `events` where it is spawned")

        return refuse

    async def stop_actor(self, ref: ActorRef[Any]) -> None:
        """Stop one actor for good: it finishes the message in hand within its `stop_timeout`."""
        await ref._cell.stop()

    def crash_actor(self, actor: ActorRef[Any] | str, error: BaseException) -> None:
        """Let the present incarnation of an actor (or of the one so named) die because of `error`, say because it
        hangs. A child is killed."""
        cell = self._cells.get(actor) if isinstance(actor, str) else actor._cell
        if cell is not None and cell.incarnation is not None:
            cell.incarnation.crash(error)

    def tell_stacks(self, name: str) -> None:
        """Have an actor log where it stands; a child in another process does so when its event loop still runs."""
        cell = self._cells.get(name)
        if cell is not None and cell.incarnation is not None:
            cell.incarnation.tell_stacks()

    # -- what is known of the actors -----------------------------------------------------------------------------

    def on_event(self, callback: Callable[[Event], None]) -> None:
        """Call `callback` for each event, from the loop. It must not raise or wait."""
        self.events.listen(callback)

    def escalate(self, cell: Cell, cause: BaseException) -> None:
        """A crash that no restart can mend: set `failed` and stop everything."""
        if self.stopping:
            return
        self.logger.critical("actor %s cannot be restarted, the system stops: %s", cell.name, cause)
        cell.cause = cause
        self.events.emit(EventKind.ESCALATED, cell.name, None, cause)
        self.failed.set(cell.name, cause)
        self.request_stop()

    def forget(self, cell: Cell) -> None:
        if self._cells.get(cell.name) is cell:
            del self._cells[cell.name]

    def describe(self) -> list[ActorStatus]:
        """All actors in order of spawn, with what each is doing and for how long. May be called from any thread."""
        now = self.clock.monotonic()
        lines = []
        for cell in list(self._cells.values()):
            incarnation = cell.incarnation
            in_hand = None if incarnation is None else incarnation.in_hand()
            lines.append(
                ActorStatus(
                    name=cell.name,
                    state=cell.state.value,
                    incarnation=None if incarnation is None else incarnation.number,
                    pid=None if incarnation is None else incarnation.pid,
                    mailbox=cell.mailbox.depths(),
                    message=None if in_hand is None else type(in_hand.message).__name__,
                    message_age=None
                    if incarnation is None or in_hand is None or not in_hand.message.timed
                    else now - incarnation.since(),
                    heartbeat_age=None if incarnation is None else incarnation.heartbeat_age(),
                )
            )
        return lines
