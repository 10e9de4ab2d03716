"""Actors that are restarted together."""

import asyncio

from actors.runtime import (
    EventKind,
)
from actors.runtime.testing import TestKit
from tests.actors.runtime.supervised import (
    GROUP,
    ONE,
    Crash,
    GetIncarnation,
    Stage,
    spawn,
)


async def test_a_group_is_stopped_in_reverse_order_and_started_in_order() -> None:
    async with TestKit() as kit:
        stage = Stage()
        refs = [await spawn(kit, stage, name, supervision=GROUP, group="g") for name in "abc"]
        await spawn(kit, stage, "x")
        stage.log.clear()
        refs[1].offer(Crash())
        await kit.run_until_idle()
        assert stage.log == ["-c0", "-a0"]
        await kit.advance(1.0)
        assert stage.log == ["-c0", "-a0", "+a1", "+b1", "+c1"]
        assert [await ref.ask(GetIncarnation(), timeout=1) for ref in refs] == [1, 1, 1]


async def test_two_deaths_at_once_make_one_group_restart() -> None:
    for seed in range(20):
        async with TestKit(seed) as kit:
            stage = Stage()
            refs = [await spawn(kit, stage, name, supervision=GROUP, group="g") for name in "abc"]
            for ref in refs[1:]:
                kit.system.crash_actor(ref, ValueError("both at once"))
            await kit.advance(1.0)
            assert [await ref.ask(GetIncarnation(), timeout=1) for ref in refs] == [1, 1, 1], seed
            assert len(kit.of(EventKind.RESTARTED)) == 3
            refs[0].offer(Crash())
            await kit.advance(2.0)
            assert await refs[2].ask(GetIncarnation(), timeout=1) == 2, "the two deaths counted as one restart"


async def test_a_member_that_fails_to_start_restarts_the_whole_group_again() -> None:
    async with TestKit() as kit:
        stage = Stage()
        refs = [await spawn(kit, stage, name, supervision=GROUP, group="g") for name in "abc"]
        stage.log.clear()
        stage.fail_starts["b"] = 1
        refs[0].offer(Crash())
        await kit.advance(1.0)
        assert stage.log == ["-c0", "-b0", "+a1", "+c1", "-c1", "-a1"]
        await kit.advance(2.0)
        assert stage.log[6:] == ["+a2", "+b2", "+c2"]


async def test_a_group_restarts_in_the_time_of_its_slowest_member() -> None:
    async with TestKit() as kit:
        stage = Stage()
        refs = [await spawn(kit, stage, name, supervision=GROUP, group="g") for name in "abc"]
        stage.slow_start = dict.fromkeys("abc", 10.0)
        refs[0].offer(Crash())
        await kit.advance(1.0 + 10.0)  # the backoff, and one start of virtual time
        assert [each.state for each in kit.system.describe()] == ["running"] * 3


async def test_a_member_that_dies_while_another_starts_does_not_wait_for_it() -> None:
    async with TestKit() as kit:
        stage = Stage()
        refs = [await spawn(kit, stage, name, supervision=GROUP, group="g") for name in "ab"]
        stage.log.clear()
        stage.slow_start["b"] = 50.0
        refs[1].offer(Crash())
        await kit.advance(2.0)
        assert stage.log == ["-a0", "+a1"]
        assert kit.system.describe()[1].state == "restarting"
        stage.slow_start["b"] = 0.0
        refs[0].offer(Crash())
        await kit.advance(8.0)  # the start of b is given its stop timeout, then cancelled; then 2 s of backoff
        assert stage.log == ["-a0", "+a1", "+a2", "+b2"]
        assert [await ref.ask(GetIncarnation(), timeout=1) for ref in refs] == [2, 2]


async def test_a_single_member_of_a_group_may_be_restarted_alone() -> None:
    async with TestKit() as kit:
        stage = Stage()
        alone = await spawn(kit, stage, "alone", supervision=ONE, group="g")
        grouped = await spawn(kit, stage, "grouped", supervision=GROUP, group="g")
        alone.offer(Crash())
        await kit.advance(1.0)
        assert [await ref.ask(GetIncarnation(), timeout=1) for ref in (alone, grouped)] == [1, 0]
        # While it waits out its own backoff of 2 s, the group's restart takes it over.
        alone.offer(Crash())
        await kit.advance(0.5)
        grouped.offer(Crash())
        await kit.advance(1.0)
        assert [await ref.ask(GetIncarnation(), timeout=1) for ref in (alone, grouped)] == [2, 1]
        await kit.advance(5.0)
        assert await alone.ask(GetIncarnation(), timeout=1) == 2


async def test_a_member_that_starts_while_its_group_restarts_comes_up_with_it() -> None:
    async with TestKit() as kit:
        stage = Stage()
        first = await spawn(kit, stage, "a", supervision=GROUP, group="g")
        stage.slow_start["b"] = 3.0
        spawning = asyncio.create_task(spawn(kit, stage, "b", supervision=GROUP, group="g", stop_timeout=0.5))
        await kit.advance(1.0)
        first.offer(Crash())
        await kit.advance(10.0)
        ref = await spawning
        assert await ref.ask(GetIncarnation(), timeout=1) == 1
