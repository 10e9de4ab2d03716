"""What hangs is reported with where it stands, and then replaced; what merely works is left alone."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from runtime_child_actors import Block, ChildProtocol, Ping, Settings

from actors import protocol as worker_protocol
from actors.runtime import Actor, ActorDied, ActorRef, ActorSystem, Backoff, Message, Supervision, handles
from actors.runtime.testing import TestKit
from actors.workers.watchdog import Watchdog
from tests.kits.waiting import until

QUICK = Supervision(max_restarts=5, within=60.0, backoff=Backoff(first=0.01, jitter=0.0))


class Protocol: ...


class Wait(Message[Protocol, str], frozen=True):
    for_ever: bool


class Load(Message[Protocol, str], frozen=True):
    timed: ClassVar[bool] = False


class Waiter(Actor[Protocol]):
    @handles
    async def wait(self, message: Wait) -> str:
        return await self.deep_down(message.for_ever)

    @handles
    async def load(self, message: Load) -> str:
        return await self.deep_down(True)

    async def deep_down(self, for_ever: bool) -> str:
        if for_ever:
            await asyncio.Event().wait()
        return "done"


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    async with ActorSystem() as system:
        yield system


async def waiter(system: ActorSystem) -> ActorRef[Protocol]:
    return await system.spawn(Waiter, name="waiter", supervision=QUICK, stop_timeout=0.1)


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "stall:" in record.getMessage()]


async def test_a_stall_is_reported_once_with_where_it_stands(
    system: ActorSystem, caplog: pytest.LogCaptureFixture
) -> None:
    ref = await waiter(system)
    reply = asyncio.ensure_future(ref.ask(Wait(for_ever=True), timeout=30.0))
    await until(lambda: system.describe()[0].message == "Wait")
    watchdog = Watchdog(system, soft=0.0, hard=60.0)
    with caplog.at_level(logging.WARNING):
        watchdog.look()
        watchdog.look()
    (report,) = reports(caplog)
    assert "waiter" in report
    assert "Wait" in report
    assert watchdog.stalls == 1
    assert any("deep_down" in record.getMessage() for record in caplog.records)
    reply.cancel()


async def test_an_actor_over_its_time_is_replaced(system: ActorSystem) -> None:
    ref = await waiter(system)
    system.start_task(Watchdog(system, soft=60.0, hard=0.05).run, "watchdog")
    with pytest.raises(ActorDied, match=r"handled Wait for .* over the watchdog's 0.05 s"):
        await ref.ask(Wait(for_ever=True), timeout=30.0)
    await until(lambda: system.describe()[0].incarnation == 1)
    assert await ref.ask(Wait(for_ever=False), timeout=60.0) == "done"
    system.request_stop()


async def test_a_loop_that_stood_still_judges_by_the_look_after() -> None:
    """The machine slept, or another program had it: what was answered meanwhile is not read yet."""
    async with TestKit() as kit:
        watchdog = Watchdog(kit.system, soft=60.0, hard=8.0)
        looks: list[float] = []
        began = kit.clock.monotonic()
        watchdog.look = lambda: looks.append(kit.clock.monotonic() - began)  # type: ignore[method-assign]
        kit.system.start_task(watchdog.run, "watchdog")
        await kit.run_until_idle()
        for now in (1.0, 2.0, 30.0, 31.0, 60.0, 90.0):  # the last one is late again: not twice in a row
            kit.clock.advance_to(began + now)
            await kit.run_until_idle()
        assert looks == [1.0, 2.0, 31.0, 90.0]
        kit.system.request_stop()


async def test_an_idle_actor_is_never_too_old(system: ActorSystem, caplog: pytest.LogCaptureFixture) -> None:
    ref = await waiter(system)
    assert await ref.ask(Wait(for_ever=False), timeout=60.0) == "done"
    Watchdog(system, soft=0.0, hard=0.0).look()
    assert reports(caplog) == []
    assert system.describe()[0].incarnation == 0


async def test_a_message_that_bounds_its_own_time_is_never_too_old(
    system: ActorSystem, caplog: pytest.LogCaptureFixture
) -> None:
    ref = await waiter(system)
    reply = asyncio.ensure_future(ref.ask(Load(), timeout=30.0))
    await until(lambda: system.describe()[0].message == "Load")
    Watchdog(system, soft=0.0, hard=0.0).look()
    assert reports(caplog) == []
    assert system.describe()[0].incarnation == 0
    assert not worker_protocol.Load.timed
    reply.cancel()


@pytest.mark.skipif(sys.platform == "win32", reason="needs a socket pair and signals")
async def test_a_child_reports_where_its_threads_stand(system: ActorSystem, caplog: pytest.LogCaptureFixture) -> None:
    ref = await system.spawn_process(
        ChildProtocol, name="worker", target="runtime_child_actors:ChildActor", config=Settings(), supervision=QUICK
    )
    assert await ref.ask(Ping(), timeout=60.0)
    with caplog.at_level(logging.WARNING):
        system.log_stacks("worker")
        await until(lambda: any("stacks of actor" in record.getMessage() for record in caplog.records))
    system.log_stacks("nobody")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a socket pair and signals")
async def test_a_child_whose_loop_is_blocked_is_killed(system: ActorSystem) -> None:
    ref = await system.spawn_process(
        ChildProtocol, name="worker", target="runtime_child_actors:ChildActor", config=Settings(), supervision=QUICK
    )
    system.start_task(Watchdog(system, soft=0.02, hard=0.3).run, "watchdog")
    await ref.tell(Block(seconds=600.0))
    await until(lambda: (system.describe()[0].incarnation or 0) >= 1)
    system.request_stop()
