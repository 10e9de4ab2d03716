"""ActorSystem: spawns actors, owns every task, and stops everything in reverse order."""

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

from actors.runtime.core.actor import Actor
from actors.runtime.core.cell import Cell, CellSettings
from actors.runtime.core.clock import Clock, SystemClock
from actors.runtime.core.events import ActorStatus, Event, EventKind, Observer
from actors.runtime.core.failure import Failure
from actors.runtime.core.incarnation import Incarnation, LocalIncarnation
from actors.runtime.core.message import Message
from actors.runtime.core.ref import ActorRef
from actors.runtime.core.supervisor import Supervision, Unit
from actors.runtime.core.system_events import SystemEvents
from actors.runtime.process.blank_process import launch_blank
from actors.runtime.process.child_process import Standby
from actors.runtime.process.frames import FRAME_LIMIT
from actors.runtime.process.incarnation import ProcessIncarnation
from actors.runtime.process.launched import Launcher
from actors.runtime.process.plan import launch, plan_process

__all__ = ["ActorSystem", "Events"]

P = TypeVar("P")

Events = ActorRef[Any] | Callable[[Message[Any, None]], None] | None
"""The destination of an actor's ``parent_tell``: an actor, a plain function, or none."""


class ActorSystem:
    """Actors in one event loop, and in child processes of it.

    It binds to the running loop when it is entered. All tasks live in one task group inside the system's own task, so
    any task may close it. After closing, no task, thread, child process or file descriptor is left. The system never
    changes signal handlers, environment or root logger.

    When a crash escalates, ``failed`` is set and all actors are stopped; the owner awaits ``failed`` and exits.
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
        """``pause`` is awaited before each message; tests control the order of actors with it. ``seed``: seed of the
        jitter.

        ``log_death`` logs an actor's death instead of the system: its owner may know more.
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
            raise RuntimeError("an actor system can be entered only once: create another")
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
        """Stop all actors, the last started first, each within its ``stop_timeout``. Returns when all have ended.

        If the caller is cancelled meanwhile, everything is cancelled or killed before this returns.
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
        """Start to stop without waiting; ``stop`` waits for the end."""
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
            raise RuntimeError("the actor system is not running: enter it with `async with` first")
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
        """Start an actor in this event loop. ``factory`` creates an instance for each incarnation.

        Returns when ``started`` has returned, and raises its exception. With ``wait=False`` it returns at once, and the
        supervisor handles a failing start.
        """
        first: list[Actor[P]] = [factory()]
        table = first[0]._handler_table()
        if any(handler.in_thread for handler in table.values()):
            raise TypeError(f"{type(first[0]).__name__} handles messages in a thread: use spawn_process")
        accepts = frozenset(table)

        def make(cell: Cell, number: int) -> Incarnation:
            return LocalIncarnation(cell, number, first.pop() if first else factory())

        return await self.place(
            make,
            accepts,
            CellSettings(
                name=name,
                capacity=capacity,
                control_capacity=control_capacity,
                supervision=supervision or Supervision(),
                group=group,
                stop_timeout=stop_timeout,
            ),
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
        launcher: Launcher = launch_blank,
        wait: bool = True,
    ) -> ActorRef[P]:
        """Start the actor class ``target`` ("package.module:Class") in a child process, as ``Class(config)``.

        The class is imported in the child only; ``protocol`` declares its messages. ``config`` is sent as msgpack and
        decoded as ``config_type`` (by default its own type), which both sides must be able to import. ``environment``
        is added to that of the child. Events of the actor go to ``events``; ``events_type`` (a message type or a union)
        declares them, by default the types that the actor of the ref handles. A child whose event loop is silent for
        ``heartbeat_timeout`` seconds is killed. At most ``window`` messages of a lane are in flight to the child;
        ``frame_limit`` is in bytes. With ``standby`` a second child waits with its imports and ``Actor.prepare`` done,
        to become the next incarnation when this one dies. ``launcher`` starts each process, by default on this host.
        ``wait`` and errors are as in ``spawn``.
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
                cell.standby = Standby(lambda: launch(cell, plan, launcher), self.clock)
                self.start_task(cell.standby.run, f"{cell.name} standby")
            return ProcessIncarnation(cell, number, plan, launcher, cell.standby)

        return await self.place(
            make,
            frozenset(plan.replies),
            CellSettings(
                name=name,
                capacity=capacity,
                control_capacity=control_capacity,
                supervision=supervision or Supervision(),
                group=group,
                stop_timeout=stop_timeout,
            ),
            events=events,
            wait=wait,
        )

    async def place(
        self,
        make: Callable[[Cell, int], Incarnation],
        accepts: frozenset[type[Message[Any, Any]]],
        settings: CellSettings,
        *,
        events: Events,
        wait: bool,
    ) -> ActorRef[Any]:
        """Start an actor whose incarnations ``make`` creates; ``spawn`` and ``spawn_process`` end here."""
        name, group = settings.name, settings.group
        if self._tasks is None or self.stopping:
            raise RuntimeError(f"cannot spawn {name!r}: the actor system is not running")
        if name in self._cells:
            raise ValueError(f"an actor named {name!r} already runs: names must be unique")
        unit = None if group is None else self._groups.setdefault(group, Unit(self, []))
        cell = Cell(self, settings, make=make, accepts=accepts, group=unit, emit=self._emitter(name, events))
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
            raise RuntimeError(f"{name!r} has no listener: pass `events` when it is spawned")

        return refuse

    async def stop_actor(self, ref: ActorRef[Any]) -> None:
        """Stop one actor permanently, after its current message and within its ``stop_timeout``."""
        await ref._cell.stop()

    def crash_actor(self, actor: ActorRef[Any] | str, error: BaseException) -> None:
        """Crash the current incarnation of an actor, given by ref or name, with ``error``, for example because it
        hangs. A child is killed."""
        cell = self._cells.get(actor) if isinstance(actor, str) else actor._cell
        if cell is not None and cell.incarnation is not None:
            cell.incarnation.crash(error)

    def log_stacks(self, name: str) -> None:
        """Let an actor log its stacks; a child process can do so only while its event loop runs."""
        cell = self._cells.get(name)
        if cell is not None and cell.incarnation is not None:
            cell.incarnation.log_stacks()

    # -- state of the actors -------------------------------------------------------------------------------------

    def on_event(self, callback: Callable[[Event], None]) -> None:
        """Call ``callback`` for each event, from the loop. It must not raise or wait."""
        self.events.listen(callback)

    def escalate(self, cell: Cell, cause: BaseException) -> None:
        """Set ``failed`` and stop everything, after a crash that supervision cannot handle."""
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
        """All actors in order of spawn, with the current message of each and its duration. Callable from any thread."""
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
