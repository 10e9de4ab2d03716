"""A test kit for actors: virtual time, interleavings chosen by a seed, and probes."""

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import anyio

from actors.runtime.core.actor import Actor, Handler
from actors.runtime.core.events import Event, EventKind
from actors.runtime.core.message import Message
from actors.runtime.core.ref import ActorRef
from actors.runtime.system import ActorSystem

__all__ = ["Probe", "TestKit", "VirtualClock"]

P = TypeVar("P")

_QUIET_ROUNDS = 20
"""Turns of the event loop without progress after which the system counts as idle."""

_MAX_YIELDS = 3
"""Most times that an actor yields before it takes a message."""


class _VirtualTimer:
    __slots__ = ("_arguments", "_callback")

    def __init__(self, callback: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._callback: Callable[..., Any] | None = callback
        self._arguments = arguments

    def cancel(self) -> None:
        self._callback = None
        self._arguments = ()

    def cancelled(self) -> bool:
        return self._callback is None

    def run(self) -> None:
        callback, arguments = self._callback, self._arguments
        self.cancel()
        if callback is not None:
            callback(*arguments)


class VirtualClock:
    """A clock whose time, in seconds, moves only by ``advance_to``. Timers due together run in the order of
    creation."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._timers: list[tuple[float, int, _VirtualTimer]] = []
        self._order = itertools.count()

    def monotonic(self) -> float:
        return self._now

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> _VirtualTimer:
        timer = _VirtualTimer(callback, args)
        heapq.heappush(self._timers, (self._now + max(0.0, delay), next(self._order), timer))
        return timer

    async def sleep(self, delay: float) -> None:
        awake = anyio.Event()
        timer = self.call_later(delay, awake.set)
        try:
            await awake.wait()
        finally:
            timer.cancel()

    def next_timer(self) -> float | None:
        """When the next timer is due; None without any."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def advance_to(self, time: float) -> None:
        """Move to ``time`` and run the timers that are due by then."""
        while (due := self.next_timer()) is not None and due <= time:
            self._now = max(self._now, due)
            heapq.heappop(self._timers)[2].run()
        self._now = max(self._now, time)


class Probe(Actor[P], Generic[P]):
    """An actor for tests: accepts the given message types, records them, and replies as configured."""

    def __init__(self, *messages: type[Message[P, Any]]) -> None:
        self.received: list[Message[P, Any]] = []
        self._messages = messages
        self._answers: dict[type[Message[P, Any]], Any] = {}

    def _handler_table(self) -> dict[type[Message[Any, Any]], Handler]:
        return {message: Handler("_receive", True) for message in self._messages}

    def answer(self, message: type[Message[P, Any]], answer: Any) -> None:
        """Reply to messages of this type with a value, an exception to raise, or the result of a function of the
        message."""
        self._answers[message] = answer

    async def _receive(self, message: Message[P, Any]) -> Any:
        self.received.append(message)
        answer = self._answers.get(type(message))
        if callable(answer):
            answer = answer(message)
            if isinstance(answer, Coroutine):
                answer = await answer
        if isinstance(answer, BaseException):
            raise answer
        return answer


class TestKit:
    """An actor system under a virtual clock.

    ``seed`` decides how often each ready actor yields to the others, which makes the interleaving reproducible.
    Deadlines, backoff and restart windows follow ``clock``; sleeps of asyncio or anyio do not, so actors should sleep
    by ``context.clock``.
    """

    __test__ = False  # pytest must not collect it despite its name

    def __init__(self, seed: int = 0, *, observer: object | None = None) -> None:
        self.clock = VirtualClock()
        self.events: list[Event] = []
        self._random = random.Random(seed)
        self._activity = 0
        self.system = ActorSystem("test", clock=self.clock, observer=observer, pause=self._pause, seed=seed)
        self.system.on_event(self._on_event)

    async def _pause(self) -> None:
        self._activity += 1
        for _ in range(self._random.randrange(_MAX_YIELDS + 1)):
            await asyncio.sleep(0)

    def _on_event(self, event: Event) -> None:
        self._activity += 1
        self.events.append(event)

    async def __aenter__(self) -> Self:
        await self.system.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop the system, and advance time as far as its deadlines need."""
        stopping = asyncio.get_running_loop().create_task(self.system.stop())
        while not stopping.done():
            await self.run_until_idle()
            due = self.clock.next_timer()
            if due is None:
                await asyncio.wait([stopping], timeout=0.05)
            elif not stopping.done():
                self.clock.advance_to(due)
        await stopping

    async def probe(self, *messages: type[Message[P, Any]], name: str = "probe") -> tuple[ActorRef[P], Probe[P]]:
        """Spawn a probe for these message types; the same instance serves all its incarnations."""
        probe: Probe[P] = Probe(*messages)
        return await self.system.spawn(lambda: probe, name=name), probe

    async def run_until_idle(self) -> None:
        """Run until no mailbox has work, without advancing time.

        A handler that waits for time or for something outside the system keeps waiting.
        """
        quiet = 0
        while quiet < _QUIET_ROUNDS:
            before = self._activity
            await asyncio.sleep(0)
            quiet = quiet + 1 if before == self._activity else 0

    async def advance(self, seconds: float) -> None:
        """Advance time, and run until idle after each timer that becomes due."""
        end = self.clock.monotonic() + seconds
        await self.run_until_idle()
        while (due := self.clock.next_timer()) is not None and due <= end:
            self.clock.advance_to(due)
            await self.run_until_idle()
        self.clock.advance_to(end)

    def of(self, kind: EventKind) -> list[Event]:
        """The events of one kind so far."""
        return [event for event in self.events if event.kind is kind]

    def assert_quiet(self) -> None:
        """Fail unless every message was handled: none waits or is being handled, no actor died, no message was lost."""
        for status in self.system.describe():
            assert not any(status.mailbox.values()), f"messages wait for {status.name}: {status.mailbox}"
            assert status.message is None, f"{status.name} still handles {status.message}"
        for kind in (EventKind.DEAD_LETTER, EventKind.DIED, EventKind.ESCALATED):
            assert not self.of(kind), f"not quiet: {self.of(kind)}"
        assert self.system.events.ask_timeouts == 0, f"{self.system.events.ask_timeouts} asks ran out of time"
        assert self.system.late_replies == 0, f"{self.system.late_replies} replies came too late"
