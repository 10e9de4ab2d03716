"""An actor that takes messages of every kind, for the tests of messaging."""

import asyncio
from typing import Any, ClassVar

from actors.runtime import (
    Actor,
    ActorRef,
    Lane,
    Message,
    RequestError,
    current_traceparent,
    handles,
)
from actors.runtime.testing import TestKit


class DeskProtocol: ...


class Work(Message[DeskProtocol, str], frozen=True):
    name: str


class Note(Message[DeskProtocol, None], frozen=True):
    name: str


class Urgent(Message[DeskProtocol, None], frozen=True):
    lane: ClassVar[Lane] = Lane.CONTROL
    name: str


class Bad(Message[DeskProtocol, int], frozen=True): ...


class Unhandled(Message[DeskProtocol, None], frozen=True): ...


class Trace(Message[DeskProtocol, str | None], frozen=True): ...


class AskMyself(Message[DeskProtocol, str], frozen=True): ...


class CancelMe(Message[DeskProtocol, None], frozen=True):
    by_task: bool


class TooLong(RequestError): ...


class Desk(Actor[DeskProtocol]):
    """Logs what it does; `Work` waits at the gate, which is open unless a test closes it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    @handles
    async def work(self, message: Work) -> str:
        self.log.append(f"begin {message.name}")
        await self.gate.wait()
        self.log.append(f"end {message.name}")
        return message.name.upper()

    @handles
    def note(self, message: Note | Urgent) -> None:
        self.log.append(message.name)

    @handles
    async def bad(self, message: Bad) -> int:
        raise TooLong("the prompt is too long")

    @handles
    def trace(self, message: Trace) -> str | None:
        return current_traceparent.get()

    @handles
    async def ask_myself(self, message: AskMyself) -> str:
        ref: ActorRef[DeskProtocol] = self.context.ref
        return await ref.ask(Work("x"), timeout=10.0)

    @handles
    async def cancel_me(self, message: CancelMe) -> None:
        if message.by_task:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(10)
        raise asyncio.CancelledError


async def desk(kit: TestKit, **options: Any) -> tuple[ActorRef[DeskProtocol], Desk]:
    actor = Desk()
    return await kit.system.spawn(lambda: actor, name="desk", **options), actor
