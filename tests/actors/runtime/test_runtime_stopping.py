"""How actors and systems stop, whatever they are in the middle of."""

import asyncio

import pytest

from actors.runtime import (
    ActorDied,
    ActorSystem,
)
from actors.runtime.testing import TestKit
from tests.actors.runtime.supervised import (
    GROUP,
    Crash,
    GetIncarnation,
    Hold,
    Leave,
    Stage,
    spawn,
)


async def test_spawn_that_is_cancelled_leaves_no_actor() -> None:
    async with TestKit() as kit:
        stage = Stage()
        stage.slow_start["w"] = 1e9
        spawning = asyncio.create_task(spawn(kit, stage, stop_timeout=1.0))
        await kit.run_until_idle()
        assert kit.system.describe()[0].state == "starting"
        spawning.cancel()
        await kit.advance(1.0)
        assert spawning.cancelled()
        assert kit.system.describe() == []


async def test_stop_during_backoff_ends_it() -> None:
    async with TestKit() as kit:
        stage = Stage()
        ref = await spawn(kit, stage)
        ref.offer(Crash())
        await kit.run_until_idle()
        waiting = asyncio.create_task(ref.ask(GetIncarnation(), timeout=60))
        await kit.run_until_idle()
        await kit.system.stop_actor(ref)
        with pytest.raises(ActorDied):
            await waiting
        await kit.advance(60.0)
        assert stage.log == ["+w0"]


async def test_system_stop_during_backoff_and_during_a_restart() -> None:
    for moment in (0.5, 2.0):
        stage = Stage()
        async with TestKit() as kit:
            refs = [await spawn(kit, stage, name, supervision=GROUP, group="g", stop_timeout=1.0) for name in "ab"]
            stage.slow_start["b"] = 50.0
            refs[0].offer(Crash())
            await kit.advance(moment)
        assert not any(ref.is_alive() for ref in refs)


async def test_an_actor_may_stop_itself() -> None:
    async with TestKit() as kit:
        stage = Stage()
        ref = await spawn(kit, stage)
        await ref.ask(Leave(), timeout=1)
        await kit.run_until_idle()
        assert not ref.is_alive()
        assert stage.log == ["+w0", "-w0"]


async def test_actors_stop_in_reverse_order_and_a_hanging_one_is_cancelled() -> None:
    stage = Stage()
    async with TestKit() as kit:
        refs = [await spawn(kit, stage, name, stop_timeout=2.0) for name in "abc"]
        held = asyncio.create_task(refs[1].ask(Hold(), timeout=60))
        await kit.run_until_idle()
        before = kit.clock.monotonic()
    assert stage.log == ["+a0", "+b0", "+c0", "-c0", "-a0"]
    assert kit.clock.monotonic() - before == pytest.approx(2.0)
    with pytest.raises(ActorDied):
        await held


async def test_two_systems_share_a_loop_and_names() -> None:
    stage = Stage()
    async with ActorSystem() as one, ActorSystem() as two:
        first = await one.spawn(stage.worker, name="w")
        second = await two.spawn(stage.worker, name="w")
        await one.stop()
        assert not first.is_alive()
        assert await second.ask(GetIncarnation(), timeout=5) == 0
        with pytest.raises(ValueError, match="named 'w' already"):
            await two.spawn(stage.worker, name="w")


async def test_an_actor_stopped_right_after_its_start_ends() -> None:
    async with TestKit() as kit:
        stage = Stage()
        stage.slow_start["w"] = 1.0
        ref = await spawn(kit, stage, wait=False)
        await kit.run_until_idle()
        stop = asyncio.create_task(kit.system.stop_actor(ref))
        await kit.advance(1.0)
        await stop
        assert stage.log == ["+w0", "-w0"]


def test_a_loop_that_ends_while_actors_restart_ends() -> None:
    async def abandon() -> None:
        system = ActorSystem()
        await system.__aenter__()
        stage = Stage()
        refs = [await system.spawn(stage.worker, name=name, supervision=GROUP, group="g") for name in "abc"]
        system.crash_actor(refs[0], ValueError("first"))
        await asyncio.sleep(0.01)
        system.crash_actor(refs[1], ValueError("second"))

    asyncio.run(asyncio.wait_for(abandon(), 60))
