"""Supervision after a crash: restart the actor, restart its group, or escalate after too many restarts.

The restart intensity is OTP's (supervisor, ``intensity`` and ``period``); RESTART_GROUP is its one_for_all.
"""

import enum
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from actors.runtime.core.cell import Cell
    from actors.runtime.system import ActorSystem

__all__ = ["Backoff", "Strategy", "Supervision", "Unit"]


class Strategy(enum.Enum):
    RESTART_ONE = "restart_one"
    RESTART_GROUP = "restart_group"
    ESCALATE = "escalate"


@dataclass(frozen=True)
class Backoff:
    """The delay before a restart, in seconds: ``first``, times ``factor`` for each restart in the window, up to
    ``max``, with a relative ``jitter`` to both sides."""

    first: float = 0.1
    factor: float = 2.0
    max: float = 5.0
    jitter: float = 0.1

    def delay(self, earlier: int, rng: random.Random) -> float:
        """Seconds to wait after ``earlier`` restarts in the window."""
        base = min(self.max, self.first * self.factor ** min(earlier, 64))
        return base * (1.0 + self.jitter * (2.0 * rng.random() - 1.0))


@dataclass(frozen=True)
class Supervision:
    """How an actor is supervised: at most ``max_restarts`` within ``within`` seconds; one more crash escalates.

    ``counts`` is called at each crash, synchronously, and returns whether the crash counts.
    """

    strategy: Strategy = Strategy.RESTART_ONE
    max_restarts: int = 5
    within: float = 60.0
    backoff: Backoff = field(default_factory=Backoff)
    counts: Callable[[], bool] = lambda: True

    @property
    def restarts_group(self) -> bool:
        return self.strategy is Strategy.RESTART_GROUP

    def admit(self, history: deque[float], now: float, rng: random.Random, *, counts: bool = True) -> float | None:
        """Record a restart at ``now``; returns the seconds to wait before it, or None after too many restarts. A
        restart that does not count is admitted and not recorded."""
        while history and history[0] <= now - self.within:
            history.popleft()
        if not counts and self.strategy is not Strategy.ESCALATE:
            return self.backoff.delay(0, rng)
        if self.strategy is Strategy.ESCALATE or len(history) >= self.max_restarts:
            return None
        history.append(now)
        return self.backoff.delay(len(history) - 1, rng)


class Unit:
    """Actors that are restarted together: a group, or an actor without a group.

    One job at a time restarts crashed members. The same job handles a member that crashes while it runs, so two deaths
    at once make one restart, and no actor is started twice.
    """

    def __init__(self, system: "ActorSystem", members: "list[Cell]") -> None:
        self._system = system
        self.members = members  # in order of spawn
        self._crashed: dict[Cell, tuple[BaseException, bool]] = {}  # (cause, whether it counts)
        self._restarts: deque[float] = deque()
        self._job: anyio.CancelScope | None = None
        self._round: anyio.CancelScope | None = None
        self.busy = False

    def on_crash(self, cell: "Cell", cause: BaseException) -> None:
        """Record a crash and start the recovery."""
        self._crashed[cell] = (cause, cell.supervision.counts())
        if self._round is not None:
            self._round.cancel()  # starting the others is pointless
        if not self.busy:
            self._begin()

    def _begin(self) -> None:
        self.busy = True
        self._job = anyio.CancelScope()
        self._system.start_task(self._recover, "restart " + " ".join(cell.name for cell in self._crashed), self._job)

    def abandon(self) -> None:
        """Cancel the recovery of crashed members."""
        self._crashed.clear()
        if self._job is not None:
            self._job.cancel()

    def leave(self, cell: "Cell") -> None:
        """Remove a member that has stopped permanently."""
        self._crashed.pop(cell, None)
        if cell in self.members:
            self.members.remove(cell)

    async def _recover(self, job: anyio.CancelScope) -> None:
        with job:
            while self._crashed:
                await self._restart(job)
        # Not reached when the whole system is cancelled: then no actor restarts.
        self._job = None
        self.busy = False
        if self._crashed and not self._system.stopping:  # one crashed after this job was cancelled
            self._begin()

    async def _restart(self, job: anyio.CancelScope) -> None:
        system = self._system
        together = len(self.members) > 1
        leader, (cause, counts) = next(iter(self._crashed.items()))
        history = self._restarts if together else leader.restarts
        delay = leader.supervision.admit(history, system.clock.monotonic(), system.random, counts=counts)
        if delay is None:
            self._crashed.clear()
            system.escalate(leader, cause)
            return
        members = list(self.members)
        if together:
            for member in members:
                member.solo.abandon()
            for member in reversed(members):
                await member.halt()
        self._crashed.clear()
        await system.clock.sleep(delay)
        try:
            # All are launched, in order, before the first is waited for: a group restarts in the time of one member.
            async with anyio.create_task_group() as starts:
                self._round = starts.cancel_scope
                for member in members:
                    starts.start_soon(self._start, member, job)
        finally:
            self._round = None

    async def _start(self, member: "Cell", job: anyio.CancelScope) -> None:
        """Start a member of the group, and record a failure."""
        if job.cancel_called or member.stopping or member.closed or member.incarnation is not None:
            return
        try:
            await member.start()
        except (Exception, SystemExit) as error:
            if not (member.stopping or member.closed):  # else it was stopping: continue without it
                self._crashed[member] = (error, member.supervision.counts())
                if self._round is not None:
                    self._round.cancel()  # starting the others is pointless
