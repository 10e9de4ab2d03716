"""What becomes of an actor that crashes, of its messages, and of whoever waits for it."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from actors.runtime import (
    ActorDied,
    AskTimeout,
    Backoff,
    EventKind,
    RequestError,
    Strategy,
    Supervision,
)
from actors.runtime.testing import TestKit
from tests.actors.runtime.supervised import (
    GROUP,
    ONE,
    Crash,
    CrashByContext,
    CrashLater,
    GetIncarnation,
    Hold,
    Keep,
    Lose,
    Refuse,
    Stage,
    spawn,
)


async def test_a_crash_fails_the_ask_in_hand_and_keeps_the_mailbox() -> None:
    async with TestKit() as kit:
        ref = await spawn(kit, Stage())
        crash = asyncio.create_task(ref.ask(Crash(), timeout=9))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(ref.ask(GetIncarnation(), timeout=9))
        await kit.run_until_idle()
        with pytest.raises(ActorDied, match="ValueError: boom") as died:
            await crash
        assert isinstance(died.value.cause, ValueError)
        assert ref.is_alive()
        assert kit.system.describe()[0].state == "restarting"
        assert not waiting.done()
        await kit.advance(1.0)
        assert await waiting == 1
        assert [event.kind for event in kit.events] == [EventKind.STARTED, EventKind.DIED, EventKind.RESTARTED]


async def test_the_stash_while_restarting_is_bounded() -> None:
    async with TestKit() as kit:
        ref = await spawn(kit, Stage(), capacity=2)
        ref.offer(Crash())
        await kit.run_until_idle()
        tells = [asyncio.create_task(ref.tell(Refuse())) for _ in range(4)]
        await kit.run_until_idle()
        assert [tell.done() for tell in tells] == [True, True, False, False]
        await kit.advance(1.0)
        assert all(tell.done() for tell in tells)


async def test_a_message_by_tell_is_redelivered_once_and_then_is_poison() -> None:
    async with TestKit() as kit:
        stage = Stage()
        ref = await spawn(kit, stage)
        await ref.tell(Keep(crashes=1))
        await kit.advance(10.0)
        assert stage.kept == {1: 2}
        assert kit.of(EventKind.DEAD_LETTER) == []
        await ref.tell(Keep(crashes=2))
        await kit.run_until_idle()
        later = asyncio.create_task(ref.ask(GetIncarnation(), timeout=60))
        await kit.advance(20.0)
        assert stage.kept == {1: 2, 2: 2}
        (letter,) = kit.of(EventKind.DEAD_LETTER)
        assert (letter.message, letter.reason) == ("Keep", "poison")
        assert await later == 3


async def test_a_message_without_redelivery_is_a_dead_letter_after_a_crash() -> None:
    async with TestKit() as kit:
        ref = await spawn(kit, Stage())
        await ref.tell(Lose())
        await kit.advance(5.0)
        (letter,) = kit.of(EventKind.DEAD_LETTER)
        assert letter.reason == "lost in a crash"
        assert await ref.ask(GetIncarnation(), timeout=1) == 1


async def test_backoff_grows_and_past_the_intensity_the_system_fails() -> None:
    async with TestKit() as kit:
        stage = Stage()
        ref = await spawn(kit, stage)
        other = await spawn(kit, stage, "other")
        for delay in (1.0, 2.0, 4.0):
            ref.offer(Crash())
            await kit.advance(delay - 0.1)
            assert kit.system.describe()[0].state == "restarting"
            await kit.advance(0.1)
            assert kit.system.describe()[0].state == "running"
        assert not kit.system.failed.is_set()
        ref.offer(Crash())
        await kit.run_until_idle()
        assert kit.system.failed.is_set()
        assert isinstance(await kit.system.failed, ValueError)
        await kit.advance(10.0)
        assert not ref.is_alive()
        assert not other.is_alive()
        assert [event.actor for event in kit.of(EventKind.ESCALATED)] == ["w"]
        with pytest.raises(ActorDied, match="boom"):
            await ref.ask(GetIncarnation(), timeout=1)
        with pytest.raises(RuntimeError, match="not running"):
            await spawn(kit, stage, "late")


async def test_the_window_forgets_and_bad_requests_never_count() -> None:
    async with TestKit() as kit:
        ref = await spawn(kit, Stage())
        for _ in range(6):
            ref.offer(Crash())
            await kit.advance(61.0)
        for _ in range(20):
            with pytest.raises(RequestError):
                await ref.ask(Refuse(), timeout=1)
        assert not kit.system.failed.is_set()
        assert await ref.ask(GetIncarnation(), timeout=1) == 6


async def test_escalate_stops_the_system_at_the_first_crash() -> None:
    async with TestKit() as kit:
        ref = await spawn(kit, Stage(), supervision=Supervision(Strategy.ESCALATE))
        with pytest.raises(ActorDied):
            await ref.ask(Crash(), timeout=1)
        await kit.run_until_idle()
        assert kit.system.failed.actor == "w"
        assert kit.system.describe() == []


async def test_a_failing_first_start_is_the_spawners_affair() -> None:
    async with TestKit() as kit:
        stage = Stage()
        stage.fail_starts["w"] = 1
        with pytest.raises(OSError, match="no device"):
            await spawn(kit, stage)
        await kit.advance(60.0)
        assert kit.system.describe() == []
        assert kit.of(EventKind.RESTARTED) == []
        ref = await spawn(kit, stage)
        assert await ref.ask(GetIncarnation(), timeout=1) == 0


async def test_a_first_start_that_nothing_awaits_is_the_supervisors() -> None:
    async with TestKit() as kit:
        stage = Stage()
        stage.fail_starts["w"] = 2
        ref = await spawn(kit, stage, wait=False)
        answer = asyncio.create_task(ref.ask(GetIncarnation(), timeout=60))
        await kit.advance(3.0)
        assert await answer == 2


async def test_a_background_task_belongs_to_its_incarnation() -> None:
    async with TestKit() as kit:
        ref = await spawn(kit, Stage())
        await ref.tell(CrashLater(5.0))
        await ref.tell(CrashLater(2.0))
        await kit.advance(3.0)
        assert await ref.ask(GetIncarnation(), timeout=1) == 1
        assert str(kit.of(EventKind.DIED)[0].cause) == "in the background"
        await kit.advance(60.0)
        assert await ref.ask(GetIncarnation(), timeout=1) == 1, "the other task ended with its incarnation"


async def test_a_background_crash_interrupts_the_handler() -> None:
    async with TestKit() as kit:
        ref = await spawn(kit, Stage())
        await ref.tell(CrashLater(1.0))
        held = asyncio.create_task(ref.ask(Hold(), timeout=60))
        await kit.advance(1.0)
        with pytest.raises(ActorDied, match="in the background"):
            await held


async def test_context_crash_is_as_if_the_handler_had_raised() -> None:
    async with TestKit() as kit:
        ref = await spawn(kit, Stage())
        with pytest.raises(ActorDied, match="by context"):
            await ref.ask(CrashByContext(), timeout=1)
        await kit.advance(1.0)
        assert await ref.ask(GetIncarnation(), timeout=1) == 1


async def test_crash_actor_from_outside_frees_a_hanging_actor() -> None:
    async with TestKit() as kit:
        ref = await spawn(kit, Stage())
        held = asyncio.create_task(ref.ask(Hold(), timeout=60))
        await kit.run_until_idle()
        kit.system.crash_actor(ref, TimeoutError("hangs"))
        with pytest.raises(ActorDied, match="hangs"):
            await held
        await kit.advance(1.0)
        assert await ref.ask(GetIncarnation(), timeout=1) == 1


async def test_a_failing_event_callback_disturbs_no_actor(caplog: pytest.LogCaptureFixture) -> None:
    async with TestKit() as kit:
        kit.system.on_event(lambda event: 1 / 0)  # type: ignore[arg-type, return-value]
        ref = await spawn(kit, Stage())
        assert await ref.ask(GetIncarnation(), timeout=1) == 0
        assert "an event callback failed" in caplog.text


def test_backoff_is_bounded_and_spread() -> None:
    backoff = Backoff(first=0.1, factor=2.0, max=1.0, jitter=0.1)
    rng = random.Random(1)
    delays = [backoff.delay(earlier, rng) for earlier in range(200)]
    assert 0.09 <= delays[0] <= 0.11
    assert all(0.9 <= delay <= 1.1 for delay in delays[4:])
    assert len(set(delays[4:])) > 100


async def test_whatever_happens_in_whatever_order_every_sender_is_answered() -> None:
    """Random crashes, stops and messages, a seed each: no caller waits for ever, and the survivors still answer."""
    for seed in range(40):
        rng = random.Random(seed)
        stage = Stage()
        stage.hold.set()
        brief = Backoff(first=0.5, max=2.0)
        group, one = (replace(supervision, max_restarts=1000, backoff=brief) for supervision in (GROUP, ONE))
        async with TestKit(seed) as kit:
            refs = [
                await spawn(
                    kit,
                    stage,
                    name,
                    capacity=2,
                    control_capacity=1,
                    group="g",
                    supervision=group if name in "abc" else one,
                    stop_timeout=1.0,
                )
                for name in "abcd"
            ]
            senders: list[asyncio.Task[Any]] = []
            for _ in range(60):
                ref = rng.choice(refs)
                match rng.randrange(9):
                    case 0:
                        kit.system.crash_actor(ref, ValueError("random"))
                    case 1:
                        senders.append(asyncio.create_task(ref.ask(Crash(), timeout=300)))
                    case 2:
                        stage.fail_starts[ref.name] = 1
                    case 3:
                        stage.slow_start[ref.name] = rng.choice([0.0, 0.5, 3.0])
                    case 4:
                        senders.append(asyncio.create_task(ref.tell(Keep(crashes=rng.randrange(3)))))
                    case 5 if rng.random() < 0.1:
                        senders.append(asyncio.create_task(kit.system.stop_actor(ref)))
                    case 6:
                        await kit.advance(rng.random() * 3.0)
                    case 7 if senders:
                        rng.choice(senders).cancel()
                    case _:
                        senders.append(asyncio.create_task(ref.ask(GetIncarnation(), timeout=300)))
                for _ in range(rng.randrange(3)):
                    await asyncio.sleep(0)
            if seed % 2 == 0:  # the others are closed in the middle of it all
                stage.slow_start.clear()
                stage.fail_starts.clear()
                await kit.advance(250.0)
                stuck = [sender for sender in senders if not sender.done()]
                assert not stuck, (seed, stuck, kit.system.describe())
                for ref in refs:
                    if ref.is_alive():
                        await ref.ask(GetIncarnation(), timeout=1)
            assert not kit.system.failed.is_set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert all(sender.done() for sender in senders), seed
        outcomes = await asyncio.gather(*senders, return_exceptions=True)
        assert not any(isinstance(outcome, AskTimeout) for outcome in outcomes), seed
        assert len(asyncio.all_tasks()) == 1
