from __future__ import annotations

import asyncio

import pytest

from actors.runtime import Actor, ActorDied, ActorSystem, Deferred, Message, RequestError, handles
from tests.kits.waiting import until


class Desk:
    """Protocol of the actor under test."""


class Promise(Message[Desk, int], frozen=True):
    number: int


class Keep(Message[Desk, None], frozen=True):
    number: int
    error: str = ""


class Clerk(Actor[Desk]):
    def __init__(self) -> None:
        self.open: dict[int, asyncio.Future[int]] = {}

    @handles
    def promise(self, message: Promise) -> Deferred[int]:
        self.open[message.number] = asyncio.get_running_loop().create_future()
        return self.open[message.number]

    @handles
    def keep(self, message: Keep) -> None:
        future = self.open.pop(message.number)
        if message.error == "request":
            future.set_exception(RequestError("no"))
        elif message.error == "crash":
            future.set_exception(ValueError("broken"))
        else:
            future.set_result(message.number * 2)


async def test_deferred_replies_come_in_order_of_completion() -> None:
    async with ActorSystem() as system:
        ref = await system.spawn(Clerk, name="clerk")
        first = asyncio.create_task(ref.ask(Promise(number=1), timeout=60))
        second = asyncio.create_task(ref.ask(Promise(number=2), timeout=60))
        await asyncio.sleep(0.001)
        await ref.tell(Keep(number=2))
        assert await second == 4
        assert not first.done()
        await ref.tell(Keep(number=1))
        assert await first == 2


async def test_a_request_error_goes_to_the_asker_and_the_actor_lives() -> None:
    async with ActorSystem() as system:
        ref = await system.spawn(Clerk, name="clerk")
        task = asyncio.create_task(ref.ask(Promise(number=1), timeout=60))
        await asyncio.sleep(0.001)
        await ref.tell(Keep(number=1, error="request"))
        with pytest.raises(RequestError, match="no"):
            await task
        assert system.describe()[0].incarnation == 0


async def test_any_other_error_is_a_crash_that_answers_everything_unfinished() -> None:
    async with ActorSystem() as system:
        ref = await system.spawn(Clerk, name="clerk")
        tasks = [asyncio.create_task(ref.ask(Promise(number=n), timeout=60)) for n in (1, 2)]
        await asyncio.sleep(0.001)
        await ref.tell(Keep(number=1, error="crash"))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, ActorDied) for result in results)
        task = asyncio.create_task(ref.ask(Promise(number=3), timeout=60))
        await until(lambda: system.describe()[0].incarnation == 1)
        await ref.tell(Keep(number=3))
        assert await task == 6
        assert system.describe()[0].incarnation == 1


async def test_an_asker_that_gives_up_leaves_no_complaint() -> None:
    async with ActorSystem() as system:
        ref = await system.spawn(Clerk, name="clerk")
        with pytest.raises(TimeoutError):
            await ref.ask(Promise(number=1), timeout=0.5)  # in which it is taken, also on a busy machine
        await ref.tell(Keep(number=1))
        await until(lambda: system.late_replies == 1)


class Panic(BaseException):
    """What some native libraries raise."""


class Fragile(Clerk):
    @handles
    def keep(self, message: Keep) -> None:
        raise Panic("native panic")


async def test_a_base_exception_is_a_crash_of_its_actor_alone() -> None:
    async with ActorSystem() as system:
        fragile = await system.spawn(Fragile, name="fragile")
        sturdy = await system.spawn(Clerk, name="sturdy")
        with pytest.raises(ActorDied):
            await fragile.ask(Keep(number=1), timeout=60)
        waiting = asyncio.create_task(sturdy.ask(Promise(number=1), timeout=60))
        await until(lambda: system.describe()[0].incarnation == 1)
        await sturdy.tell(Keep(number=1))
        assert await waiting == 2
        assert [actor.incarnation for actor in system.describe()] == [1, 0]
        assert not system.failed.is_set()
