from __future__ import annotations

import asyncio
import time

import pytest

from actors.runtime import Actor, ActorSystem, AskTimeout, EventKind, Message, RequestError, handles
from telemetry.metrics.actor_messages import ActorMessages
from telemetry.metrics.label_limiter import LabelLimiter
from telemetry.metrics.loop_lag import LoopLag
from tests.kits.waiting import PATIENCE


class CountedProtocol: ...


class Work(Message[CountedProtocol, int], frozen=True):
    value: int


class Stall(Message[CountedProtocol, None], frozen=True): ...


class Refused(RequestError):
    pass


class Counted(Actor[CountedProtocol]):
    @handles
    def work(self, message: Work) -> int:
        if message.value < 0:
            raise Refused("negative")
        if message.value == 99:
            raise ValueError("a crash")
        return message.value

    @handles
    async def stall(self, message: Stall) -> None:
        await asyncio.Event().wait()


async def test_every_message_is_counted_by_actor_and_kind_with_its_errors() -> None:
    traffic = ActorMessages()
    async with ActorSystem(observer=traffic) as system:
        ref = await system.spawn(Counted, name="counted")
        for value in (1, 2, 3):
            await ref.ask(Work(value), timeout=5.0)
        with pytest.raises(Refused):
            await ref.ask(Work(-1), timeout=5.0)
    flow = traffic.flows["counted", "Work"]
    assert (flow.count, flow.errors, flow.depth) == (4, 1, 0)
    assert flow.waiting.count == 4
    assert 0 < flow.busy_seconds < PATIENCE
    assert 0 < flow.wait_seconds < PATIENCE


async def test_timeouts_dead_letters_and_restarts_are_counted_with_their_cause() -> None:
    traffic = ActorMessages()
    async with ActorSystem(observer=traffic) as system:
        restarted = asyncio.Event()

        def on_event(event: object) -> None:
            kind = getattr(event, "kind", None)
            if kind is EventKind.DIED:
                traffic.died(event.actor, event.cause, event.at - 600)  # type: ignore[attr-defined]
            elif kind is EventKind.RESTARTED:
                restarted.set()

        system.on_event(on_event)
        ref = await system.spawn(Counted, name="counted")
        await ref.tell(Work(99))
        await asyncio.wait_for(restarted.wait(), 60)
        assert traffic.restarts == {("counted", "ValueError"): 1}
        assert traffic.recovery["counted",].count == 1
        assert traffic.recovery["counted",].total >= 600
        other = await system.spawn(Counted, name="other")
        with pytest.raises(AskTimeout):
            await other.ask(Stall(), timeout=0.01)
        assert traffic.ask_timeouts == {("other", "Stall"): 1}
        await system.stop_actor(ref)
        await ref.tell(Work(1))
    assert traffic.dead_letters["counted", "Work", "stopped"] == 1


async def test_a_restart_without_a_death_is_its_groups() -> None:
    traffic = ActorMessages()
    traffic.restarted("scheduler")
    assert traffic.restarts == {("scheduler", "group"): 1}
    assert traffic.recovery == {}


async def test_a_blocked_loop_shows_as_lag() -> None:
    lag = LoopLag(interval=0.01)
    task = asyncio.create_task(lag.sample())
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(time.sleep, 0.2)
    await asyncio.sleep(0.3)
    assert lag.histogram.total > 0.1
    assert lag.tasks >= 2
    task.cancel()


def test_label_values_of_clients_are_bounded() -> None:
    bounded: LabelLimiter[str] = LabelLimiter("other", max_labels=2)
    assert [bounded(value) for value in ("a", "b", "c", "a", "d")] == ["a", "b", "other", "a", "other"]
