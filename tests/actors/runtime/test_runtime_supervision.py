import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from actors.runtime import (
    Actor,
    ActorDied,
    ActorRef,
    ActorSystem,
    AskTimeout,
    Backoff,
    EventKind,
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


class Life(Message[WorkerProtocol, int], frozen=True):
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
    """What the incarnations of the workers leave behind, and what they are told to do at their start."""

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
    def life(self, message: Life) -> int:
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


async def test_a_crash_fails_the_ask_in_hand_and_keeps_the_mailbox() -> None:
    async with TestKit() as kit:
        ref = await spawn(kit, Stage())
        crash = asyncio.create_task(ref.ask(Crash(), timeout=9))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(ref.ask(Life(), timeout=9))
        await kit.settle()
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
        await kit.settle()
        tells = [asyncio.create_task(ref.tell(Refuse())) for _ in range(4)]
        await kit.settle()
        assert [tell.done() for tell in tells] == [True, True, False, False]
        await kit.advance(1.0)
        assert all(tell.done() for tell in tells)


async def test_a_told_message_is_redelivered_once_and_then_is_poison() -> None:
    async with TestKit() as kit:
        stage = Stage()
        ref = await spawn(kit, stage)
        await ref.tell(Keep(crashes=1))
        await kit.advance(10.0)
        assert stage.kept == {1: 2}
        assert kit.of(EventKind.DEAD_LETTER) == []
        await ref.tell(Keep(crashes=2))
        await kit.settle()
        later = asyncio.create_task(ref.ask(Life(), timeout=60))
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
        assert await ref.ask(Life(), timeout=1) == 1


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
        await kit.settle()
        assert kit.system.failed.is_set()
        assert isinstance(await kit.system.failed, ValueError)
        await kit.advance(10.0)
        assert not ref.is_alive()
        assert not other.is_alive()
        assert [event.actor for event in kit.of(EventKind.ESCALATED)] == ["w"]
        with pytest.raises(ActorDied, match="boom"):
            await ref.ask(Life(), timeout=1)
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
        assert await ref.ask(Life(), timeout=1) == 6


async def test_escalate_stops_the_system_at_the_first_crash() -> None:
    async with TestKit() as kit:
        ref = await spawn(kit, Stage(), supervision=Supervision(Strategy.ESCALATE))
        with pytest.raises(ActorDied):
            await ref.ask(Crash(), timeout=1)
        await kit.settle()
        assert kit.system.failed.actor == "w"
        assert kit.system.describe() == []


async def test_a_group_is_stopped_in_reverse_order_and_started_in_order() -> None:
    async with TestKit() as kit:
        stage = Stage()
        refs = [await spawn(kit, stage, name, supervision=GROUP, group="g") for name in "abc"]
        await spawn(kit, stage, "x")
        stage.log.clear()
        refs[1].offer(Crash())
        await kit.settle()
        assert stage.log == ["-c0", "-a0"]
        await kit.advance(1.0)
        assert stage.log == ["-c0", "-a0", "+a1", "+b1", "+c1"]
        assert [await ref.ask(Life(), timeout=1) for ref in refs] == [1, 1, 1]


async def test_two_deaths_at_once_make_one_group_restart() -> None:
    for seed in range(20):
        async with TestKit(seed) as kit:
            stage = Stage()
            refs = [await spawn(kit, stage, name, supervision=GROUP, group="g") for name in "abc"]
            for ref in refs[1:]:
                kit.system.crash_actor(ref, ValueError("both at once"))
            await kit.advance(1.0)
            assert [await ref.ask(Life(), timeout=1) for ref in refs] == [1, 1, 1], seed
            assert len(kit.of(EventKind.RESTARTED)) == 3
            refs[0].offer(Crash())
            await kit.advance(2.0)
            assert await refs[2].ask(Life(), timeout=1) == 2, "the two deaths counted as one restart"


async def test_a_member_that_fails_to_start_restarts_the_whole_group_again() -> None:
    async with TestKit() as kit:
        stage = Stage()
        refs = [await spawn(kit, stage, name, supervision=GROUP, group="g") for name in "abc"]
        stage.log.clear()
        stage.fail_starts["b"] = 1
        refs[0].offer(Crash())
        await kit.advance(1.0)
        assert stage.log == ["-c0", "-b0", "+a1", "-a1"]
        await kit.advance(2.0)
        assert stage.log[4:] == ["+a2", "+b2", "+c1"]


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
        assert [await ref.ask(Life(), timeout=1) for ref in refs] == [2, 2]


async def test_a_single_member_of_a_group_may_be_restarted_alone() -> None:
    async with TestKit() as kit:
        stage = Stage()
        alone = await spawn(kit, stage, "alone", supervision=ONE, group="g")
        grouped = await spawn(kit, stage, "grouped", supervision=GROUP, group="g")
        alone.offer(Crash())
        await kit.advance(1.0)
        assert [await ref.ask(Life(), timeout=1) for ref in (alone, grouped)] == [1, 0]
        # While it waits out its own backoff of 2 s, the group's restart takes it over.
        alone.offer(Crash())
        await kit.advance(0.5)
        grouped.offer(Crash())
        await kit.advance(1.0)
        assert [await ref.ask(Life(), timeout=1) for ref in (alone, grouped)] == [2, 1]
        await kit.advance(5.0)
        assert await alone.ask(Life(), timeout=1) == 2


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
        assert await ref.ask(Life(), timeout=1) == 0


async def test_a_first_start_that_nobody_waits_for_is_the_supervisors() -> None:
    async with TestKit() as kit:
        stage = Stage()
        stage.fail_starts["w"] = 2
        ref = await spawn(kit, stage, wait=False)
        answer = asyncio.create_task(ref.ask(Life(), timeout=60))
        await kit.advance(3.0)
        assert await answer == 2


async def test_spawn_that_is_cancelled_leaves_no_actor() -> None:
    async with TestKit() as kit:
        stage = Stage()
        stage.slow_start["w"] = 1e9
        spawning = asyncio.create_task(spawn(kit, stage, stop_timeout=1.0))
        await kit.settle()
        assert kit.system.describe()[0].state == "starting"
        spawning.cancel()
        await kit.advance(1.0)
        assert spawning.cancelled()
        assert kit.system.describe() == []


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
        assert await ref.ask(Life(), timeout=1) == 1


async def test_stop_during_backoff_ends_it() -> None:
    async with TestKit() as kit:
        stage = Stage()
        ref = await spawn(kit, stage)
        ref.offer(Crash())
        await kit.settle()
        waiting = asyncio.create_task(ref.ask(Life(), timeout=60))
        await kit.settle()
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


async def test_a_background_task_belongs_to_its_incarnation() -> None:
    async with TestKit() as kit:
        ref = await spawn(kit, Stage())
        await ref.tell(CrashLater(5.0))
        await ref.tell(CrashLater(2.0))
        await kit.advance(3.0)
        assert await ref.ask(Life(), timeout=1) == 1
        assert str(kit.of(EventKind.DIED)[0].cause) == "in the background"
        await kit.advance(60.0)
        assert await ref.ask(Life(), timeout=1) == 1, "the other task ended with its incarnation"


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
        assert await ref.ask(Life(), timeout=1) == 1


async def test_crash_actor_from_outside_frees_a_hanging_actor() -> None:
    async with TestKit() as kit:
        ref = await spawn(kit, Stage())
        held = asyncio.create_task(ref.ask(Hold(), timeout=60))
        await kit.settle()
        kit.system.crash_actor(ref, TimeoutError("hangs"))
        with pytest.raises(ActorDied, match="hangs"):
            await held
        await kit.advance(1.0)
        assert await ref.ask(Life(), timeout=1) == 1


async def test_an_actor_may_stop_itself() -> None:
    async with TestKit() as kit:
        stage = Stage()
        ref = await spawn(kit, stage)
        await ref.ask(Leave(), timeout=1)
        await kit.settle()
        assert not ref.is_alive()
        assert stage.log == ["+w0", "-w0"]


async def test_actors_stop_in_reverse_order_and_a_hanging_one_is_cancelled() -> None:
    stage = Stage()
    async with TestKit() as kit:
        refs = [await spawn(kit, stage, name, stop_timeout=2.0) for name in "abc"]
        held = asyncio.create_task(refs[1].ask(Hold(), timeout=60))
        await kit.settle()
        before = kit.clock.monotonic()
    assert stage.log == ["+a0", "+b0", "+c0", "-c0", "-a0"]
    assert kit.clock.monotonic() - before == pytest.approx(2.0)
    with pytest.raises(ActorDied):
        await held


async def test_a_failing_event_callback_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async with TestKit() as kit:
        kit.system.on_event(lambda event: 1 / 0)  # type: ignore[arg-type, return-value]
        ref = await spawn(kit, Stage())
        assert await ref.ask(Life(), timeout=1) == 0
        assert "an event callback failed" in caplog.text


def test_backoff_is_bounded_and_spread() -> None:
    backoff = Backoff(first=0.1, factor=2.0, max=1.0, jitter=0.1)
    rng = random.Random(1)
    delays = [backoff.delay(earlier, rng) for earlier in range(200)]
    assert 0.09 <= delays[0] <= 0.11
    assert all(0.9 <= delay <= 1.1 for delay in delays[4:])
    assert len(set(delays[4:])) > 100


async def test_two_systems_share_a_loop_and_names() -> None:
    stage = Stage()
    async with ActorSystem() as one, ActorSystem() as two:
        first = await one.spawn(stage.worker, name="w")
        second = await two.spawn(stage.worker, name="w")
        await one.stop()
        assert not first.is_alive()
        assert await second.ask(Life(), timeout=5) == 0
        with pytest.raises(ValueError, match="named 'w' already"):
            await two.spawn(stage.worker, name="w")


async def test_what_started_has_begun_stopping_ends_even_if_no_message_came_between() -> None:
    async with TestKit() as kit:
        stage = Stage()
        stage.slow_start["w"] = 1.0
        ref = await spawn(kit, stage, wait=False)
        await kit.settle()
        stop = asyncio.create_task(kit.system.stop_actor(ref))
        await kit.advance(1.0)
        await stop
        assert stage.log == ["+w0", "-w0"]


async def test_whatever_happens_in_whatever_order_every_sender_is_answered() -> None:
    """Random crashes, stops and messages, a seed each: nobody waits for ever, and the survivors still answer."""
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
                        senders.append(asyncio.create_task(ref.ask(Life(), timeout=300)))
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
                        await ref.ask(Life(), timeout=1)
            assert not kit.system.failed.is_set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert all(sender.done() for sender in senders), seed
        outcomes = await asyncio.gather(*senders, return_exceptions=True)
        assert not any(isinstance(outcome, AskTimeout) for outcome in outcomes), seed
        assert len(asyncio.all_tasks()) == 1


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
