"""Messages between actors of one system."""

import asyncio
import contextvars
import logging
from typing import Any

import pytest

from actors.runtime import (
    Actor,
    ActorDied,
    ActorSystem,
    AskTimeout,
    HandlerCancelled,
    MailboxFull,
    UnknownMessage,
    current_traceparent,
    handles,
)
from actors.runtime.testing import TestKit
from tests.actors.runtime.desk import (
    AskMyself,
    Bad,
    CancelMe,
    Desk,
    DeskProtocol,
    Note,
    TooLong,
    Trace,
    Unhandled,
    Urgent,
    Work,
    desk,
)


async def test_ask_returns_the_reply_and_request_errors_keep_the_actor_alive() -> None:
    async with TestKit() as kit:
        ref, _ = await desk(kit)
        assert await ref.ask(Work("a"), timeout=1) == "A"
        with pytest.raises(TooLong, match="too long"):
            await ref.ask(Bad(), timeout=1)
        assert await ref.ask(Work("b"), timeout=1) == "B"
        kit.assert_quiet()


async def test_awaiting_in_a_handler_does_not_admit_the_next_message() -> None:
    async with TestKit() as kit:
        ref, actor = await desk(kit)
        actor.gate.clear()
        asks = [asyncio.create_task(ref.ask(Work(name), timeout=5)) for name in "ab"]
        await kit.run_until_idle()
        await ref.tell(Note("n"))
        await kit.run_until_idle()
        assert actor.log == ["begin a"]
        actor.gate.set()
        assert await asyncio.gather(*asks) == ["A", "B"]
        await kit.run_until_idle()
        assert actor.log == ["begin a", "end a", "begin b", "end b", "n"]


async def test_control_overtakes_data_even_when_the_data_lane_is_full() -> None:
    async with TestKit() as kit:
        ref, actor = await desk(kit, capacity=2)
        actor.gate.clear()
        ask = asyncio.create_task(ref.ask(Work("a"), timeout=5))
        await kit.run_until_idle()
        ref.offer(Note("1"))
        ref.offer(Note("2"))
        with pytest.raises(MailboxFull):
            ref.offer(Note("3"))
        ref.offer(Urgent("stop"))
        actor.gate.set()
        await ask
        await kit.run_until_idle()
        assert actor.log == ["begin a", "end a", "stop", "1", "2"]


async def test_tells_wait_in_order_and_a_cancelled_one_is_skipped() -> None:
    async with TestKit() as kit:
        ref, actor = await desk(kit, capacity=1)
        actor.gate.clear()
        ask = asyncio.create_task(ref.ask(Work("a"), timeout=5))
        await kit.run_until_idle()
        tells = [asyncio.create_task(ref.tell(Note(name))) for name in "1234"]
        await kit.run_until_idle()
        assert [tell.done() for tell in tells] == [True, False, False, False]
        tells[2].cancel()
        await kit.run_until_idle()
        actor.gate.set()
        await ask
        await kit.run_until_idle()
        assert actor.log == ["begin a", "end a", "1", "2", "4"]
        kit.assert_quiet()


async def test_ask_times_out_by_the_clock_and_its_late_reply_is_dropped() -> None:
    async with TestKit() as kit:
        ref, actor = await desk(kit)
        actor.gate.clear()
        ask = asyncio.create_task(ref.ask(Work("slow"), timeout=2.0))
        queued = asyncio.create_task(ref.ask(Work("never"), timeout=2.0))
        await kit.advance(1.9)
        assert not ask.done()
        await kit.advance(0.1)
        with pytest.raises(AskTimeout, match=r"desk.*Work.*2 s"):
            await ask
        with pytest.raises(AskTimeout):
            await queued
        actor.gate.set()
        await kit.run_until_idle()
        assert actor.log == ["begin slow", "end slow"], "an ask that timed out in the mailbox is not handled"
        assert kit.system.late_replies == 1
        assert kit.system.events.ask_timeouts == 2
        assert await ref.ask(Work("next"), timeout=1) == "NEXT"


async def test_a_cancelled_asker_leaves_the_actor_at_work() -> None:
    async with TestKit() as kit:
        ref, actor = await desk(kit)
        actor.gate.clear()
        first, second = (asyncio.create_task(ref.ask(Work(name), timeout=5)) for name in "ab")
        await kit.run_until_idle()
        first.cancel()
        second.cancel()
        await kit.run_until_idle()
        actor.gate.set()
        assert await ref.ask(Work("c"), timeout=1) == "C"
        assert actor.log == ["begin a", "end a", "begin c", "end c"]


@pytest.mark.parametrize("by_task", [True, False])
async def test_a_cancelled_handler_does_not_stop_the_loop(by_task: bool) -> None:
    async with TestKit() as kit:
        ref, _ = await desk(kit)
        with pytest.raises(HandlerCancelled):
            await ref.ask(CancelMe(by_task), timeout=1)
        assert await ref.ask(Work("on"), timeout=1) == "ON"
        task = ref._cell.task
        assert task is not None
        task.cancel()  # while it waits for messages
        await kit.run_until_idle()
        assert await ref.ask(Work("and on"), timeout=1) == "AND ON"
        assert kit.system.describe()[0].incarnation == 0


async def test_spurious_wakeups_are_harmless() -> None:
    async with TestKit() as kit:
        ref, actor = await desk(kit)
        for _ in range(5):
            ref._cell.mailbox.wake()
            await kit.run_until_idle()
        assert await ref.ask(Work("a"), timeout=1) == "A"
        assert actor.log == ["begin a", "end a"]


async def test_an_unknown_message_is_refused_at_the_sender() -> None:
    async with TestKit() as kit:
        ref, _ = await desk(kit)
        for send in (ref.ask(Unhandled(), timeout=1), ref.tell(Unhandled())):
            with pytest.raises(UnknownMessage, match="no handler for Unhandled"):
                await send
        with pytest.raises(UnknownMessage):
            ref.offer(Unhandled())


async def test_expired_tells_are_dropped_wherever_they_wait() -> None:
    async with TestKit() as kit:
        ref, actor = await desk(kit, capacity=1)
        actor.gate.clear()
        ask = asyncio.create_task(ref.ask(Work("a"), timeout=50))
        await kit.run_until_idle()
        now = kit.clock.monotonic()
        await ref.tell(Note("in the lane"), deadline=now + 1)
        waiting = asyncio.create_task(ref.tell(Note("in the line"), deadline=now + 2))
        await kit.advance(3)
        assert waiting.done()
        actor.gate.set()
        await ask
        await kit.run_until_idle()
        assert actor.log == ["begin a", "end a"]
        assert [letter.reason for letter in kit.events if letter.message == "Note"] == ["expired", "expired"]
        assert kit.system.events.dead_letters == 2


async def test_a_stopped_actor_answers_everyone() -> None:
    async with TestKit() as kit:
        ref, actor = await desk(kit, capacity=1, stop_timeout=3.0)
        actor.gate.clear()
        in_hand = asyncio.create_task(ref.ask(Work("a"), timeout=50))
        await kit.run_until_idle()
        await ref.tell(Note("queued"))
        waiting = asyncio.create_task(ref.tell(Note("waiting")))
        never_started = asyncio.create_task(ref.ask(Work("b"), timeout=50))
        await kit.run_until_idle()
        stop = asyncio.create_task(kit.system.stop_actor(ref))
        await kit.advance(2.9)
        assert not stop.done()
        assert kit.system.describe()[0].state == "stopping"
        await kit.advance(0.2)
        await stop
        for ask in (in_hand, never_started):
            with pytest.raises(ActorDied, match="desk"):
                await ask
        await waiting
        assert not ref.is_alive()
        assert kit.system.events.dead_letters == 2
        with pytest.raises(ActorDied):
            await ref.ask(Work("c"), timeout=1)
        await ref.tell(Note("late"))
        ref.offer(Note("late"))
        assert kit.system.events.dead_letters == 4
        assert kit.system.describe() == []


async def test_dead_letters_are_logged_once_a_kind_with_the_trace(caplog: pytest.LogCaptureFixture) -> None:
    async with TestKit() as kit:
        ref, _ = await desk(kit)
        await kit.system.stop_actor(ref)
        token = current_traceparent.set("00-abc-def-01")
        with caplog.at_level(logging.WARNING, logger="troupe"):
            for _ in range(3):
                await ref.tell(Note("x"))
        current_traceparent.reset(token)
        records = [record.getMessage() for record in caplog.records]
        assert len(records) == 1
        assert "Note" in records[0]
        assert "00-abc-def-01" in records[0]
        assert kit.system.events.dead_letters == 3


async def test_trace_context_travels_in_the_envelope_and_is_not_inherited() -> None:
    opener = contextvars.ContextVar("opener", default="clean")
    token = current_traceparent.set("the opener's")
    opener.set("leaked")
    seen: list[str] = []

    class Peeking(Desk):
        async def started(self) -> None:
            seen.append(opener.get())
            seen.append(str(current_traceparent.get()))

    async with TestKit() as kit:
        ref = await kit.system.spawn(Peeking, name="desk")
        assert await ref.ask(Trace(), timeout=1) == "the opener's"
        current_traceparent.set("another")
        assert await ref.ask(Trace(), timeout=1) == "another"
        current_traceparent.reset(token)
        assert await ref.ask(Trace(), timeout=1) is None
    assert seen == ["clean", "None"]


async def test_asking_oneself_fails_at_once() -> None:
    async with TestKit() as kit:
        ref, _ = await desk(kit)
        with pytest.raises(ActorDied, match="asks itself"):
            await ref.ask(AskMyself(), timeout=1)


async def test_a_flood_does_not_starve_the_loop() -> None:
    async with ActorSystem() as system:
        actor = Desk()
        ref = await system.spawn(lambda: actor, name="desk", capacity=10_000)
        for number in range(5_000):
            ref.offer(Note(str(number)))
        turns = 0
        while len(actor.log) < 5_000:
            await asyncio.sleep(0)
            turns += 1
        assert turns > 50


async def test_the_observer_sees_each_message_and_may_lack_methods() -> None:
    class Seen:
        def __init__(self) -> None:
            self.handled_: list[tuple[str, str, bool]] = []

        def handled(self, actor: str, message: str, **measures: Any) -> None:
            assert measures["wait"] >= 0
            assert measures["duration"] >= 0
            self.handled_.append((actor, message, measures["error"] is not None))

    observer = Seen()
    async with TestKit(observer=observer) as kit:
        ref, _ = await desk(kit)
        await ref.ask(Work("a"), timeout=1)
        with pytest.raises(TooLong):
            await ref.ask(Bad(), timeout=1)
        await kit.system.stop_actor(ref)
        ref.offer(Note("dead letter"))
    assert observer.handled_ == [("desk", "Work", False), ("desk", "Bad", True)]


async def test_describe_names_the_message_in_hand_and_its_age() -> None:
    async with TestKit() as kit:
        ref, actor = await desk(kit)
        actor.gate.clear()
        asks = [asyncio.create_task(ref.ask(Work(name), timeout=50)) for name in "ab"]
        await kit.run_until_idle()
        await ref.tell(Urgent("u"))
        await kit.advance(3.0)
        (status,) = kit.system.describe()
        assert (status.name, status.state, status.incarnation, status.message) == ("desk", "running", 0, "Work")
        assert status.message_age == pytest.approx(3.0)
        assert status.mailbox == {"control": 1, "replies": 0, "data": 1}
        actor.gate.set()
        await asyncio.gather(*asks)


def test_a_wrong_handler_is_refused_when_its_class_is_made() -> None:
    with pytest.raises(TypeError, match=r"returns int, but Work promises str"):

        class WrongReply(Actor[DeskProtocol]):
            @handles
            def work(self, message: Work) -> int:
                return 1

    with pytest.raises(TypeError, match="both handle Work"):

        class Twice(Actor[DeskProtocol]):
            @handles
            def one(self, message: Work) -> str:
                return ""

            @handles
            def two(self, message: Work) -> str:
                return ""

    with pytest.raises(TypeError, match="annotate the parameter"):

        class NoMessage(Actor[DeskProtocol]):
            @handles
            def one(self, message: int) -> None: ...


async def test_a_method_that_overrides_a_handler_is_a_handler() -> None:
    class Overriding(Desk):
        def work(self, message: Work) -> str:  # type: ignore[override]
            return "overridden"

    async with TestKit() as kit:
        ref = await kit.system.spawn(Overriding, name="desk")
        assert await ref.ask(Work("a"), timeout=1) == "overridden"
