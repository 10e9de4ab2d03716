"""Workers that crash, hang and leave on request, for the tests of supervision."""

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

from actors.runtime import (
    Actor,
    ActorRef,
    Backoff,
    Lane,
    Message,
    RequestError,
    Strategy,
    Supervision,
    handles,
)
from actors.runtime.testing import TestKit

STEADY = Backoff(first=1.0, factor=2.0, max=60.0, jitter=0.0)
ONE = Supervision(max_restarts=3, within=60.0, backoff=STEADY)
GROUP = Supervision(Strategy.RESTART_GROUP, max_restarts=3, within=60.0, backoff=STEADY)


class WorkerProtocol: ...


class Crash(Message[WorkerProtocol, None], frozen=True):
    lane: ClassVar[Lane] = Lane.CONTROL


class GetIncarnation(Message[WorkerProtocol, int], frozen=True):
    """Which incarnation answers."""


class Keep(Message[WorkerProtocol, None], frozen=True):
    redeliver: ClassVar[bool] = True
    crashes: int


class Lose(Message[WorkerProtocol, None], frozen=True): ...


class Refuse(Message[WorkerProtocol, None], frozen=True): ...


class Hold(Message[WorkerProtocol, None], frozen=True): ...


class CrashLater(Message[WorkerProtocol, None], frozen=True):
    seconds: float


class CrashByContext(Message[WorkerProtocol, None], frozen=True): ...


class Leave(Message[WorkerProtocol, None], frozen=True): ...


class Stage:
    """What the incarnations of the workers leave behind, and their orders for the start."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.kept: dict[int, int] = {}
        self.fail_starts: dict[str, int] = {}
        self.slow_start: dict[str, float] = {}
        self.on_start: Callable[[str], None] = lambda name: None
        self.hold = asyncio.Event()

    def worker(self) -> "Worker":
        return Worker(self)


class Worker(Actor[WorkerProtocol]):
    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    async def started(self) -> None:
        name = self.context.name
        if self.stage.slow_start.get(name):
            await self.context.clock.sleep(self.stage.slow_start[name])
        if self.stage.fail_starts.get(name, 0) > 0:
            self.stage.fail_starts[name] -= 1
            raise OSError("no device")
        self.stage.log.append(f"+{name}{self.context.incarnation}")
        self.stage.on_start(name)

    async def stopping(self) -> None:
        self.stage.log.append(f"-{self.context.name}{self.context.incarnation}")

    @handles
    def crash(self, message: Crash | Lose) -> None:
        raise ValueError("boom")

    @handles
    def incarnation(self, message: GetIncarnation) -> int:
        return self.context.incarnation

    @handles
    def keep(self, message: Keep) -> None:
        seen = self.stage.kept[message.crashes] = self.stage.kept.get(message.crashes, 0) + 1
        if seen <= message.crashes:
            raise ValueError("boom")

    @handles
    def refuse(self, message: Refuse) -> None:
        raise RequestError("bad request")

    @handles
    async def hold(self, message: Hold) -> None:
        await self.stage.hold.wait()

    @handles
    def crash_later(self, message: CrashLater) -> None:
        async def later() -> None:
            await self.context.clock.sleep(message.seconds)
            raise ValueError("in the background")

        self.context.start_soon(later)

    @handles
    def crash_by_context(self, message: CrashByContext) -> None:
        self.context.crash(ValueError("by context"))

    @handles
    def leave(self, message: Leave) -> None:
        self.context.stop_self()


async def spawn(kit: TestKit, stage: Stage, name: str = "w", **options: Any) -> ActorRef[WorkerProtocol]:
    options.setdefault("supervision", ONE)
    return await kit.system.spawn(stage.worker, name=name, **options)
